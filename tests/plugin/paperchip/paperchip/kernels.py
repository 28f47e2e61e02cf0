"""Records of our kernels, light enough for a probe. `pagoda.kernels` also lends one to somebody else's device."""

from __future__ import annotations

from pagoda.hal.kernel import Kernel, Needs, Reason
from pagoda.ops.norm import NormFacts

WRONG = (
    ("gemm", "ragged", "RaggedGemm"),
    ("gated_activation", "rounded", "RoundedGate"),
    ("paged_attention", "decode", "DecodeAttention"),
    ("write_kv", "swapped", "SwappedPages"),
)
"""What `pagoda diff` has to name."""


def own_kernels() -> tuple[Kernel, ...]:
    """For our own chip, offered by the backend."""
    here = frozenset({"a4"})
    return (
        Kernel("rms_norm", "paper", "paperchip.implementation:PaperRmsNorm", Needs(archs=here), accepts=_plain_weight, rank=2.0),
        Kernel("gated_activation", "paper", "paperchip.implementation:PaperGate", Needs(archs=here, facts={"kind": ("silu",)}), rank=1.0),
    )


def for_device(device: str) -> tuple[Kernel, ...]:
    """For somebody else's device, by the name it is chosen with. The reference device gets what is wrong on purpose, below its own."""
    if device == "reference":
        return tuple(Kernel(op, name, f"paperchip.wrong:{implementation}", rank=-2.0) for op, name, implementation in WRONG)
    if device != "cpu":
        return ()
    return (Kernel("rms_norm", "paper", "paperchip.implementation:PaperRmsNorm", accepts=_plain_weight, rank=-0.5),)


def _plain_weight(facts: NormFacts) -> Reason | None:
    return None if facts.weight and facts.offset == 0 else "scales by a weight as it is"
