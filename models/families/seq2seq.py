"""What families of encoder-decoders share: a decoder's layer as two of ours, the second with the cross-attention, and names for both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pagoda.models.checkpoint import Rename, Rule
from pagoda.models.spec import Attention, Bidirectional, Cross, Layer, Mlp, Moe, Norm, Normed, Residual

POST = Normed((1.0, 1.0), (1.0, 1.0))
"""Each sublayer adds to what it read, normed: norms after the sum, as the first transformers had them."""


def decoder_layers(
    own: Attention, cross: Cross, ff: Mlp | Moe, norm: Norm, first: Norm | None = None, post: bool = False
) -> tuple[Layer, Layer]:
    """One layer of theirs. With `post` norms the one before it is that which ended the last layer: `first`."""
    residual = POST if post else Residual.SEQUENTIAL
    return Layer(own, None, first if post else norm, residual=residual), Layer(cross, ff, norm, ff_in=norm, residual=residual)


def post_norm_decoder(count: int, own: Attention, cross: Cross, ff: Mlp | Moe, norm: Norm, embed_norm: bool) -> tuple[Layer, ...]:
    """All layers; the first norm is that of the embeddings, where there is one."""
    firsts = (norm if embed_norm else None, *(norm,) * (count - 1))
    return tuple(layer for first in firsts for layer in decoder_layers(own, cross, ff, norm, first, post=True))


def encoder_layer(attention: Attention, ff: Mlp | Moe, norm: Norm) -> Layer:
    """With norms before."""
    return Layer(Bidirectional(attention), ff, norm, ff_in=norm)


def post_norm_encoder(count: int, attention: Attention, ff: Mlp, norm: Norm, embed_norm: bool) -> tuple[Layer, ...]:
    layer = replace(encoder_layer(attention, ff, norm), residual=POST)
    return (layer if embed_norm else replace(layer, mixer_in=None), *(layer,) * (count - 1))


def renamed(theirs: str, ours: str, names: Mapping[str, str]) -> tuple[Rule, ...]:
    """Tensors of the modules `names` below a layer of theirs, below one of ours; {i} stands for the layer."""
    return tuple(Rename(f"{theirs}.{old}.{{t}}", f"{ours}.{new}.{{t}}") for old, new in names.items())


def decoder_names(at: str, count: int, own: Mapping[str, str], cross: Mapping[str, str]) -> tuple[Rule, ...]:
    """Layers below `at`: their modules that go to the first of our two layers, and to the second."""
    pairs = ((own, 0), (cross, 1))
    return tuple(rule for i in range(count) for names, place in pairs for rule in renamed(f"{at}.{i}", f"layers.{2 * i + place}", names))
