"""Multi-token prediction (arXiv:2412.19437): a layer beyond the model's last one, which guesses the token after next.

It reads the model's last state of a token, and the token that follows. Checkpoints keep it with norms of both, the product that joins them,
and an embedding and a head that may be its own: as layer N of N (DeepSeek V3, GLM 4.5), below `mtp` (Qwen3-Next, Qwen 3.5) or below
`model.mtp` (MiMo V2 Flash, of whose heads the first is read).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from pagoda.hal.device import Device
from pagoda.hal.errors import ModelError
from pagoda.hal.table import KernelTable
from pagoda.models.blocks.norm import NormBlock
from pagoda.models.builder import Builder
from pagoda.models.checkpoint import apply, check
from pagoda.models.decoder import Decoder
from pagoda.models.load import Checkpoint, Description
from pagoda.models.parallel.shard import Shard
from pagoda.models.spec import MLA, Attention, DecoderSpec, Layer, Mlp
from pagoda.quant.format import StoredTensor
from pagoda.quant.registry import format_for


@dataclass(frozen=True)
class Kept:
    """How a checkpoint keeps it.

    Attributes:
        at: where its layer's tensors lie; `around`: names below `at`'s first part, beside the layer, as a model of one layer has them.
        joins: the tensor that says whether it is there.
        normed: a further guess reads the layer's state after its norm, and not the one before.
        sliding: its layer slides and has no experts, whatever the last one does.
    """

    at: str
    around: Mapping[str, str]
    joins: str
    normed: bool = False
    sliding: bool = False

    def named(self, tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
        """Its own tensors, as a checkpoint of one layer has them."""
        named = {ours: tensors[theirs] for theirs, ours in self.around.items() if theirs in tensors}
        inner = {name.removeprefix(self.at): tensor for name, tensor in tensors.items() if name.startswith(self.at)}
        return named | {f"model.layers.0.{_INNER.get(name, name)}": t for name, t in inner.items() if self.at + name not in self.around}


_ENDS = {"norm": "model.norm", "rows": "embed.row_norm", "states": "embed.state_norm", "join": "embed.join"}
_INNER = {"pre_mlp_layernorm.weight": "post_attention_layernorm.weight"}


def _around(at: str, **names: str) -> dict[str, str]:
    return {f"{at}{theirs}.weight": f"{_ENDS.get(ours, ours)}.weight" for ours, theirs in names.items()}


def kept(tensors: Mapping[str, StoredTensor], layers: int) -> Kept:
    """How a checkpoint of that many layers keeps it. Raises `ModelError` where it has none."""
    last, inner = f"model.layers.{layers}.", "model.mtp.layers.0."
    parts = {"rows": "enorm", "states": "hnorm", "join": "eh_proj"}
    own = {"norm": "shared_head.norm", "lm_head": "shared_head.head", "model.embed_tokens": "embed_tokens"}
    apart = _around("mtp.", norm="norm", rows="pre_fc_norm_embedding", states="pre_fc_norm_hidden", join="fc")
    ways = (
        Kept(last, _around(last, **parts, **own), f"{last}eh_proj.weight"),
        Kept("mtp.layers.0.", apart, "mtp.fc.weight", normed=True),
        Kept(inner, _around(inner, **parts, norm="final_layernorm"), f"{inner}eh_proj.weight", normed=True, sliding=True),
    )
    found = next((way for way in ways if way.joins in tensors), None)
    if found is None:
        named = ", ".join(way.joins for way in ways)
        raise ModelError(f"the checkpoint has no layer that predicts several tokens (none of {named}); take the method ngram")
    return found


class Ahead(NamedTuple):
    """That layer as a `model` of its own, whole whatever the ranks are; the norm that the main model's `last` states go through first; and
    whether a further guess reads its states `normed`."""

    model: Decoder
    last: NormBlock
    normed: bool


def load_ahead(checkpoint: Checkpoint, main: Description, device: Device, table: KernelTable) -> Ahead:
    """Raises `ModelError` where there is none, `CheckpointError` where its tensors do not fit."""
    if not isinstance(main.spec, DecoderSpec) or main.family is None or checkpoint.open is None:
        raise ModelError("drafting by the model's own layer (mtp) needs a native model with its weights; take the method ngram")
    tensors = checkpoint.open().tensors
    way = kept(tensors, len(main.spec.layers))
    spec = ahead_spec(main.spec, way)
    shared = {name: tensors[name] for name in ("model.embed_tokens.weight", "lm_head.weight") if name in tensors}
    stored = apply(main.family.rules(spec), shared | way.named(tensors) | {"last.weight": tensors["model.norm.weight"]})
    listed = Builder(main.numerics, Shard(), format_for({}, {}, "none"))
    facts = replace(main.facts, caches=Decoder(spec, listed).caches)
    listed.norm("last", spec.norm, spec.width)
    check(stored, listed.parameters, main.format)
    build = Builder(main.numerics, Shard(), main.format, stored, table, device)
    model, last = Decoder(spec, build, facts), build.norm("last", spec.norm, spec.width)
    assert last is not None
    return Ahead(model, last, way.normed)


def ahead_spec(spec: DecoderSpec, way: Kept) -> DecoderSpec:
    """A model of one layer, like the last one that attends, whose way in joins tokens and states."""
    attending = [layer for layer in spec.layers if isinstance(layer.mixer, Attention | MLA)]
    if way.sliding:
        attending = [layer for layer in attending if isinstance(layer.mixer, Attention) and layer.mixer.window is not None]
    if not attending:
        raise ModelError("no layer of this model attends as the one that predicts several tokens does; take the method ngram")
    dense = [layer.feed_forward for layer in spec.layers if way.sliding and isinstance(layer.feed_forward, Mlp)]
    layer = _own(replace(attending[-1], feed_forward=dense[0]) if dense else attending[-1])
    return replace(spec, layers=(layer,), embed=replace(spec.embed, joins=spec.norm))


def _own(layer: Layer) -> Layer:
    """It has no layer before it that could have chosen keys."""
    mixer = layer.mixer
    if not isinstance(mixer, MLA) or mixer.index is None:
        return layer
    return replace(layer, mixer=replace(mixer, index=replace(mixer.index, own=True)))
