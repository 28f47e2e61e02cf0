"""What stands between the two products of an expert, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl
from pagoda.ops.moe import MoeMlpFacts


@triton.jit
def activated(gate, up, alpha, limit, KIND: tl.constexpr):
    if KIND == "clamped":
        gate, up = tl.minimum(gate, limit), tl.minimum(tl.maximum(up, -limit), limit)
        return gate / (1.0 + tl.exp(-alpha * gate)) * (up + 1.0)
    return gate / (1.0 + tl.exp(-gate)) * up


def kind_of(facts: MoeMlpFacts) -> str:
    """Of the activation, as the kernels name it."""
    return "clamped" if facts.limit is not None and facts.alpha is not None else "silu"
