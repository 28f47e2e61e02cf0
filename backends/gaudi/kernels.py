"""Records of the fused operators of Intel's bridge for Gaudi; nothing of the vendor is imported here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagoda.backends.torch_accelerator.plain import plain_attention, plain_norm
from pagoda.hal.kernel import Kernel, Needs, Reason

if TYPE_CHECKING:
    from pagoda.ops.moe import MoeMlpFacts

HERE = "pagoda.backends.gaudi.fused"
NEEDS = Needs(dtypes=frozenset({"bfloat16"}), packages=("habana_frameworks",))
NORMS = Needs(dtypes=frozenset({"bfloat16", "float32"}), packages=("habana_frameworks",))
CAPTURABLE = frozenset({"capturable"})


def _silu_experts(facts: MoeMlpFacts) -> Reason | None:
    plain = facts.gated and not (facts.bias or facts.scale_input) and facts.limit is None and facts.alpha is None
    return None if plain and facts.activation == "silu" else "experts with SiLU gates, no biases and weighted outputs only"


def gaudi_kernels() -> tuple[Kernel, ...]:
    return (
        Kernel("rms_norm", "habana", f"{HERE}:RmsNorm", NORMS, plain_norm, 1.0, CAPTURABLE),
        Kernel("add_rms_norm", "habana", f"{HERE}:AddRmsNorm", NORMS, plain_norm, 1.0, CAPTURABLE),
        Kernel("moe_mlp", "habana", f"{HERE}:MoeMlp", NEEDS, _silu_experts, 1.0, CAPTURABLE),
        Kernel("paged_attention", "habana", f"{HERE}:PagedAttention", NEEDS, plain_attention, 1.0, CAPTURABLE),
    )
