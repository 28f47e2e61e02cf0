"""Records of the fused operators of Huawei's CANN, as torch-npu offers them; nothing of the vendor is imported here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagoda.backends.torch_accelerator.plain import plain_attention, plain_norm
from pagoda.hal.kernel import Kernel, Needs, Reason

if TYPE_CHECKING:
    from pagoda.ops.activation import ActivationFacts
    from pagoda.ops.attention import AttentionFacts
    from pagoda.ops.moe import MoeMlpFacts

HERE = "pagoda.backends.ascend.fused"
FLOATS = Needs(dtypes=frozenset({"float32", "float16", "bfloat16"}), packages=("torch_npu",))
HALVES = Needs(dtypes=frozenset({"float16", "bfloat16"}), packages=("torch_npu",))
CAPTURABLE = frozenset({"capturable"})
WIDEST_HEAD, WIDEST_ROW, LARGEST_GROUP = 512, 65535, 64
"""Numbers of a head and of all heads of a token, and query heads of a KV head, that the operator takes."""


def _plain_silu(facts: ActivationFacts) -> Reason | None:
    return None if facts.kind == "silu" and facts.limit is None else f"plain SiLU only, not {facts.kind} with limit {facts.limit}"


def _silu_experts(facts: MoeMlpFacts) -> Reason | None:
    plain = facts.gated and not facts.bias and facts.limit is None and facts.alpha is None
    return None if plain and facts.activation == "silu" else "experts with SiLU gates and no biases only"


def _attends(facts: AttentionFacts) -> Reason | None:
    if (reason := plain_attention(facts)) is not None:
        return reason
    if facts.head_dim % 16 or facts.head_dim > WIDEST_HEAD or facts.num_heads * facts.head_dim >= WIDEST_ROW:
        return f"heads of a multiple of 16 numbers up to {WIDEST_HEAD}, {WIDEST_ROW} in all, not {facts.num_heads} of {facts.head_dim}"
    group = facts.num_heads // facts.num_kv_heads
    return f"up to {LARGEST_GROUP} query heads a KV head, not {group}" if group > LARGEST_GROUP else None


def _packed_bytes(facts: MoeMlpFacts) -> int:
    return 3 * (facts.local or facts.experts) * facts.width * facts.hidden * 2


def ascend_kernels() -> tuple[Kernel, ...]:
    return (
        Kernel("rms_norm", "cann", f"{HERE}:RmsNorm", FLOATS, plain_norm, 1.0, CAPTURABLE),
        Kernel("add_rms_norm", "cann", f"{HERE}:AddRmsNorm", FLOATS, plain_norm, 1.0, CAPTURABLE),
        Kernel("gated_activation", "cann", f"{HERE}:GatedActivation", FLOATS, _plain_silu, 1.0, CAPTURABLE),
        Kernel("moe_mlp", "cann", f"{HERE}:MoeMlp", HALVES, _silu_experts, 1.0, CAPTURABLE, _packed_bytes),
        Kernel("paged_attention", "cann", f"{HERE}:PagedAttention", HALVES, _attends, 1.0, needs_host_lengths=True),
    )
