"""What families of encoder-decoders share: a decoder's layer as two of ours, the second with the cross-attention, and names for both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pagoda.models.checkpoint import Rule
from pagoda.models.families.common import renamed
from pagoda.models.families.pooled import POST_NORMS
from pagoda.models.spec import Attention, Bidirectional, Cross, Layer, Mlp, Moe, Norm, Residual


def decoder_layers(
    own: Attention, cross: Cross, ff: Mlp | Moe, norm: Norm, first: Norm | None = None, post: bool = False
) -> tuple[Layer, Layer]:
    """One layer of theirs. With `post` norms the one before it is that which ended the last layer: `first`."""
    residual = POST_NORMS if post else Residual.SEQUENTIAL
    return Layer(own, None, first if post else norm, residual=residual), Layer(cross, ff, norm, ff_in=norm, residual=residual)


def post_norm_decoder(count: int, own: Attention, cross: Cross, ff: Mlp | Moe, norm: Norm, embed_norm: bool) -> tuple[Layer, ...]:
    """All layers; the first norm is that of the embeddings, where there is one."""
    firsts = (norm if embed_norm else None, *(norm,) * (count - 1))
    return tuple(layer for first in firsts for layer in decoder_layers(own, cross, ff, norm, first, post=True))


def encoder_layer(attention: Attention, ff: Mlp | Moe, norm: Norm) -> Layer:
    """With norms before."""
    return Layer(Bidirectional(attention), ff, norm, ff_in=norm)


def post_norm_encoder(count: int, attention: Attention, ff: Mlp, norm: Norm, embed_norm: bool) -> tuple[Layer, ...]:
    layer = replace(encoder_layer(attention, ff, norm), residual=POST_NORMS)
    return (layer if embed_norm else replace(layer, mixer_in=None), *(layer,) * (count - 1))


def decoder_names(at: str, count: int, own: Mapping[str, str], cross: Mapping[str, str]) -> tuple[Rule, ...]:
    """Layers below `at`: their modules that go to the first of our two layers, and to the second."""
    pairs = ((own, 0), (cross, 1))
    return tuple(rule for i in range(count) for names, place in pairs for rule in renamed(names, f"{at}.{i}", f"layers.{2 * i + place}"))
