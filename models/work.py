"""Working memory of a step, before any weight is read."""

from __future__ import annotations

from pagoda.hal.kv import DTYPE_BYTES
from pagoda.models.builder import Builder
from pagoda.models.spec import MLA, Attention, Bidirectional, Both, Cross, DecoderSpec, Mixer, Mlp, Shared


def work_bytes(spec: DecoderSpec, build: Builder) -> int:
    """The stream and its normed copy, and the widest of what one layer holds at once."""
    widest = 0
    for layer in spec.layers:
        attention = _mixer_numbers(layer.mixer)
        hidden = layer.feed_forward.hidden if layer.feed_forward else 0
        times = 3 if isinstance(layer.feed_forward, Mlp) else 3 * getattr(layer.feed_forward, "top_k", 0)
        widest = max(widest, attention, hidden * times)
    return DTYPE_BYTES[build.numerics.dtype] * (4 * spec.width + -(-widest // build.shard.world))


def _mixer_numbers(mixer: Mixer | None) -> int:
    match mixer:
        case None:
            return 0
        case Attention():
            return (mixer.heads * 2 + mixer.kv_heads * 2) * mixer.head_dim
        case MLA():
            latent = mixer.kv_rank + mixer.rope_dim
            chosen = mixer.index.heads * (mixer.index.dim + 1) + mixer.index.top_k if mixer.index is not None else 0
            return mixer.heads * (2 * (mixer.nope_dim + mixer.rope_dim) + 3 * latent + mixer.v_dim) + chosen
        case Bidirectional() | Cross():
            return _mixer_numbers(mixer.attention)
        case Both():
            return _mixer_numbers(mixer.attention) + _mixer_numbers(mixer.recurrent)
        case Shared():
            return _mixer_numbers(mixer.attention) + _mixer_numbers(mixer.recurrent) + 3 * mixer.feed_forward.hidden
        case _:
            return mixer.numbers
