"""Multi-token prediction (arXiv:2412.19437): a layer beyond the model's last one, which guesses the token after next.

It reads the model's last state of a token, and the token that follows; checkpoints keep it as layer N of N, with norms of both, the product
that joins them, and an embedding and a head that may be its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pagoda.hal.device import Device
from pagoda.hal.errors import ModelError
from pagoda.hal.table import KernelTable
from pagoda.models.blocks.norm import NormBlock
from pagoda.models.builder import Builder
from pagoda.models.checkpoint import apply, check
from pagoda.models.decoder import Decoder
from pagoda.models.load import Checkpoint, Description
from pagoda.models.parallel.shard import Shard
from pagoda.models.spec import MLA, DecoderSpec, Layer
from pagoda.quant.format import StoredTensor
from pagoda.quant.registry import format_for

_AROUND = {
    "embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight",
    "shared_head.norm.weight": "model.norm.weight", "enorm.weight": "embed.row_norm.weight", "hnorm.weight": "embed.state_norm.weight",
    "eh_proj.weight": "embed.join.weight",
}  # fmt: skip
"""Of its tensors, those that are not of a layer, as a model of one layer has them."""


def load_ahead(checkpoint: Checkpoint, main: Description, device: Device, table: KernelTable) -> tuple[Decoder, NormBlock]:
    """That layer as a model of its own, whole whatever the ranks are, and the norm that the main model's last states go through first.

    Raises `ModelError` where there is none, `CheckpointError` where its tensors do not fit.
    """
    if not isinstance(main.spec, DecoderSpec) or main.family is None or checkpoint.open is None:
        raise ModelError("drafting by the model's own layer (mtp) needs a native model with its weights; take the method ngram")
    spec = ahead_spec(main.spec)
    stored = apply(main.family.rules(spec), ahead_tensors(checkpoint.open().tensors, len(main.spec.layers)))
    listed = Builder(main.numerics, Shard(), format_for({}, {}, "none"))
    facts = replace(main.facts, caches=Decoder(spec, listed).caches)
    listed.norm("last", spec.norm, spec.width)
    check(stored, listed.parameters, main.format)
    build = Builder(main.numerics, Shard(), main.format, stored, table, device)
    model, last = Decoder(spec, build, facts), build.norm("last", spec.norm, spec.width)
    assert last is not None
    return model, last


def ahead_spec(spec: DecoderSpec) -> DecoderSpec:
    """A model of one layer, the last one's like, whose way in joins tokens and states."""
    return replace(spec, layers=(_own(spec.layers[-1]),), embed=replace(spec.embed, joins=spec.norm))


def _own(layer: Layer) -> Layer:
    """It has no layer before it that could have chosen keys."""
    mixer = layer.mixer
    if not isinstance(mixer, MLA) or mixer.index is None:
        return layer
    return replace(layer, mixer=replace(mixer, index=replace(mixer.index, own=True)))


def ahead_tensors(tensors: Mapping[str, StoredTensor], layers: int) -> dict[str, StoredTensor]:
    """Its tensors under the names of a checkpoint with one layer. Raises `ModelError` where there are none."""
    at = f"model.layers.{layers}."
    own = {name.removeprefix(at): tensor for name, tensor in tensors.items() if name.startswith(at)}
    if "eh_proj.weight" not in own:
        raise ModelError(f"the checkpoint has no layer that predicts several tokens ({at}eh_proj.weight); take the method ngram")
    named = {name: tensors[name] for name in ("model.embed_tokens.weight", "lm_head.weight") if name in tensors}
    named |= {_AROUND.get(name, f"model.layers.0.{name}"): tensor for name, tensor in own.items()}
    return named | {"last.weight": tensors["model.norm.weight"]}
