"""What vendors' fused operators refuse alike: uses of a primitive that are not the plain one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagoda.hal.kernel import Reason

if TYPE_CHECKING:
    from pagoda.ops.attention import AttentionFacts
    from pagoda.ops.norm import NormFacts


def plain_norm(facts: NormFacts) -> Reason | None:
    """Why a norm is not `x / rms(x) · weight`, or None."""
    return None if facts.weight and not facts.offset else "norms with a plain weight only"


def plain_attention(facts: AttentionFacts) -> Reason | None:
    """Why attention is not a softmax over all keys, of one width and dtype with the values, or over those before a query; or None."""
    asked = [name for name in ("window", "chunk", "softcap", "sinks", "alibi", "bias", "latent") if getattr(facts, name)]
    if asked:
        return f"no {' or '.join(asked)}"
    plain = facts.kv_dtype == facts.dtype and facts.v_dim == facts.head_dim
    return None if plain else "K and V of the same width, in the dtype of q"
