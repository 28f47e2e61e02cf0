"""Records of the kernels for Apple GPUs: shaders of our own, compiled by torch when a use of them is first launched."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagoda.hal.kernel import Kernel, Needs, Reason

if TYPE_CHECKING:
    from pagoda.ops.activation import ActivationFacts
    from pagoda.ops.attention import AttentionFacts

HERE = "pagoda.backends.metal.shaders"
FLOATS = frozenset({"float32", "float16", "bfloat16"})
NEEDS = Needs(dtypes=FLOATS)
CLAIMS = frozenset({"batch_invariant"})
WIDEST_HEAD = 512


def _known(facts: ActivationFacts) -> Reason | None:
    return "Metal has no erf" if facts.kind == "gelu" else None


def _float_pages(facts: AttentionFacts) -> Reason | None:
    return None if facts.kv_dtype in FLOATS else f"pages of floating-point numbers of 16 or 32 bits, not {facts.kv_dtype}"


def _attends(facts: AttentionFacts) -> Reason | None:
    widest = max(facts.head_dim, facts.v_dim)
    return _float_pages(facts) or (f"heads of up to {WIDEST_HEAD} numbers, not {widest}" if widest > WIDEST_HEAD else None)


def metal_kernels() -> tuple[Kernel, ...]:
    return (
        Kernel("rms_norm", "metal", f"{HERE}:RmsNorm", NEEDS, None, 1.0, CLAIMS),
        Kernel("add_rms_norm", "metal", f"{HERE}:AddRmsNorm", NEEDS, None, 1.0, CLAIMS),
        Kernel("gated_activation", "metal", f"{HERE}:GatedActivation", NEEDS, _known, 1.0, CLAIMS),
        Kernel("rope", "metal", f"{HERE}:Rope", NEEDS, None, 1.0, CLAIMS),
        Kernel("write_kv", "metal", f"{HERE}:WriteKv", NEEDS, _float_pages, 1.0, CLAIMS),
        Kernel("paged_attention", "metal", f"{HERE}:PagedAttention", NEEDS, _attends, 1.0, CLAIMS),
    )
