"""Records of the fused operators of Intel's bridge for Gaudi; nothing of the vendor is imported here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagoda.hal.kernel import Kernel, Needs, Reason

if TYPE_CHECKING:
    from pagoda.ops.attention import AttentionFacts
    from pagoda.ops.moe import MoeMlpFacts
    from pagoda.ops.norm import NormFacts

HERE = "pagoda.backends.gaudi.fused"
NEEDS = Needs(dtypes=frozenset({"bfloat16"}), packages=("habana_frameworks",))
NORMS = Needs(dtypes=frozenset({"bfloat16", "float32"}), packages=("habana_frameworks",))
CAPTURABLE = frozenset({"capturable"})


def _weighted(facts: NormFacts) -> Reason | None:
    return None if facts.weight and not facts.offset else "norms with a plain weight only"


def _silu_experts(facts: MoeMlpFacts) -> Reason | None:
    plain = facts.gated and not (facts.bias or facts.scale_input) and facts.limit is None and facts.alpha is None
    return None if plain and facts.activation == "silu" else "experts with SiLU gates, no biases and weighted outputs only"


def _attends(facts: AttentionFacts) -> Reason | None:
    asked = [name for name in ("window", "chunk", "softcap", "sinks", "alibi", "bias", "latent") if getattr(facts, name)]
    if asked:
        return f"no {' or '.join(asked)}"
    plain = facts.kv_dtype == facts.dtype and facts.v_dim == facts.head_dim
    return None if plain else "K and V of the same width, in the dtype of q"


def gaudi_kernels() -> tuple[Kernel, ...]:
    return (
        Kernel("rms_norm", "habana", f"{HERE}:RmsNorm", NORMS, _weighted, 1.0, CAPTURABLE),
        Kernel("add_rms_norm", "habana", f"{HERE}:AddRmsNorm", NORMS, _weighted, 1.0, CAPTURABLE),
        Kernel("moe_mlp", "habana", f"{HERE}:MoeMlp", NEEDS, _silu_experts, 1.0, CAPTURABLE),
        Kernel("paged_attention", "habana", f"{HERE}:PagedAttention", NEEDS, _attends, 1.0, CAPTURABLE),
    )
