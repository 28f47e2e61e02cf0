"""Native decoders under transformers' vision towers: the text part of a checkpoint that sees, and the encoder beside it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from pagoda.hal.device import Device
from pagoda.hal.errors import CheckpointError, ModelError
from pagoda.models.bridge.encoder import BOTH_WAYS, BridgedEncoder, media_facts, seeing_part
from pagoda.models.bridge.interface import ASK, RUN, register
from pagoda.models.bridge.kinds import bridged_class
from pagoda.models.bridge.load import filled_module, place
from pagoda.models.bridge.module import Module, attend_by, body_paths, hollow_module, read_config, replaced
from pagoda.models.bridge.probe import head
from pagoda.models.decoder import ropes_in
from pagoda.models.family import Family
from pagoda.models.loaded import Loaded
from pagoda.models.loading.dummy_source import DummySource
from pagoda.models.loading.open import Checkpoint
from pagoda.models.media import Encoder, MediaFacts
from pagoda.models.registry import families
from pagoda.models.spec import DecoderSpec
from pagoda.models.weights import RenamedSource
from pagoda.quant.format import StoredTensor

_NAMES = tuple((re.compile(pattern), new) for pattern, new in (
    (r"^(?:(?:model\.)?(?:language_model|text_model)\.)?lm_head\.", "lm_head."),
    (r"^language_model\.(?=backbone\.|model\.decoder\.)", ""),
    (r"^(?:model\.(?:language_model|text_model)\.(?:model\.)?|language_model\.model\.)(?:encoder\.(?=layers\.))?", "model."),
    (r"^(?:model\.)?(?=(?:embed_tokens|layers|norm)\.)", "model."),
))  # fmt: skip
_PACKED = ("float8", "int8", "uint8", "int32")
"""How numbers begin that need a scale beside them."""
PROBED = (1.0, 50.0)
"""Products of a head whose logits are looked at."""


@dataclass(frozen=True)
class Text:
    """The language model in a config.json that sees, before anything is read.

    Attributes:
        config: its own, as transformers reads it. whole: that of all, likewise. key: of the one in the other, empty where they are one.
    """

    family: Family
    config: Mapping[str, Any]
    whole: Mapping[str, Any]
    key: str


@dataclass(frozen=True)
class Seeing:
    """What stands before a language model.

    Attributes:
        config: the checkpoint's, whose language model has one layer, which never runs. stored: tensors under the checkpoint's names.
        body: path of the language model. top: of what puts media before it.
        nbytes: of the encoder's weights. tied: the language model's head is its table of tokens.
        logits: what the whole model makes of the head's products `PROBED`; None where that cannot be tried.
    """

    config: Mapping[str, Any]
    stored: Mapping[str, StoredTensor]
    body: str
    top: str
    media: MediaFacts
    nbytes: int
    tied: bool
    logits: tuple[float, ...] | None


def text_of(config: Mapping[str, Any]) -> Text | None:
    """The language model in a config.json that sees, where a family knows it; else None: all of it is to run by the bridge."""
    try:
        whole = read_config(config)
        text = whole.get_text_config(decoder=True)
        known = type(text)().to_dict()  # what the language model's code may read, and not all that lies beside it
    except (KeyError, TypeError, ValueError, ModelError):
        return None
    parts = () if text is not whole else tuple(whole.sub_configs)
    key = "" if parts else next((name for name in whole.sub_configs if getattr(whole, name, None) is text), None)
    kind = f"{whole.model_type}_text" if parts else text.model_type
    family = next((family for family in families() if not family.pools and kind in family.model_types), None)
    if key is None or family is None:
        return None
    told = {"use_bidirectional_attention"} if whole.model_type in BOTH_WAYS else set()  # items say what sees what
    own = {name: value for name, value in text.to_dict().items() if name in known and name not in told and name not in parts}
    return Text(family, own | {"model_type": kind}, whole.to_dict(), key)


def text_checkpoint(checkpoint: Checkpoint, text: Text, tied: bool) -> Checkpoint:
    """The language model alone, under the names that its family knows."""
    family, opened = text.family, checkpoint.open
    given = {"architectures": list(family.architectures[:1]), "tie_word_embeddings": tied}
    packed = {name: checkpoint.config[name] for name in ("quantization_config",) if name in checkpoint.config}
    config = {**text.config, **given, **packed}
    return replace(checkpoint, config=config, open=None if opened is None else lambda: RenamedSource(opened(), _text_name))


def under(sees: Seeing, spec: DecoderSpec) -> DecoderSpec:
    """The language model's spec as it is under a tower: some leave out what their text models do to logits. Raises `ModelError` where a
    family lacks something."""
    axes, way_out = {len(rope.sections) for rope in ropes_in(spec.layers)}, spec.head
    if spec.encoder is not None or (sees.media.axes > 1 and axes != {sees.media.axes}):
        raise ModelError(f"no family here runs this language model with {sees.media.axes} positions a token")
    scaled = torch.tensor(PROBED) * way_out.scale
    alone = scaled if way_out.softcap is None else torch.tanh(scaled / way_out.softcap) * way_out.softcap
    if sees.logits is None or torch.allclose(torch.tensor(sees.logits), alone):
        return spec
    if sees.logits != PROBED:
        raise ModelError("what this model does to logits is not known here")
    return replace(spec, head=replace(way_out, scale=1.0, softcap=None))


def _text_name(name: str) -> str | None:
    return next((pattern.sub(new, name).replace("model.blocks.", "model.layers.") for pattern, new in _NAMES if pattern.match(name)), None)


def text_module(path: str) -> str:
    """What a module of the language model is called where that is alone. Raises `CheckpointError` for one that sees."""
    name = _text_name(f"{path}.")
    if name is None:
        raise CheckpointError(f"{path} is no part of the language model, and adapters of what sees are not supported; train without them")
    return name.removesuffix(".")


def _sees(name: str) -> bool:
    """Of a tensor, whether what sees is built with it: all but later layers of text."""
    return re.search(r"\.layers\.[1-9]", _text_name(name) or "") is None


def seeing(checkpoint: Checkpoint, text: Text, dtype: str) -> Seeing:
    """What stands before the language model. Raises `ModelError` for what a step of several requests would get wrong."""
    register()
    config = _short(text)
    module = hollow_module(bridged_class(config), config, dtype, ASK)
    body, top = next(iter(body_paths(module)), ("", ""))
    media = media_facts(module, body, module.get_submodule(body).config.hidden_size) if body else None
    if media is None:
        raise ModelError(f"transformers' {type(module).__name__} puts nothing before its language model")
    source = checkpoint.open() if checkpoint.open is not None else None
    stored = {name: tensor for name, tensor in source.tensors.items() if _sees(name)} if source is not None else {}
    packed = [name for name, tensor in stored.items() if tensor.dtype.startswith(_PACKED) and _text_name(name) is None]
    if packed:
        raise ModelError(f"{packed[0]} is quantised, which only the language model may be")
    own = module.get_output_embeddings()
    tied = own is not None and own.weight is module.get_input_embeddings().weight
    logits = _logits(module, top)
    return Seeing(config, stored, body, top, media, sum(tensor.nbytes for tensor in _kept(module, body, top)), tied, logits)


def _logits(module: Module, top: str) -> tuple[float, ...] | None:
    """Of `PROBED`, by a head of one number."""
    own = module.get_output_embeddings()
    path = next((name for name, part in module.named_modules() if part is own), None)
    one = torch.nn.Linear(1, 1, bias=False).requires_grad_(False)
    one.weight.fill_(1.0)
    try:
        with replaced(module, path or "", one):
            return tuple(head(module, top, torch.tensor(PROBED).view(1, -1, 1))[0, :, 0].tolist())
    except Exception:  # whatever a model's code raises without numbers
        return None


def load_encoder(sees: Seeing, dtype: str, device: Device, loaded: Loaded, seed: int = 0) -> Encoder | None:
    """The encoder with its weights, which `loaded` counts; None on a device without numbers."""
    if device.torch_device.type == "meta":
        return None
    register()
    stored = sees.stored
    if not stored:
        hollow = hollow_module(bridged_class(sees.config), sees.config, dtype, RUN)
        stored = DummySource(((name, tuple(t.shape), dtype) for name, t in hollow.state_dict().items()), seed).tensors
    module = filled_module(sees.config, "tokens", dtype, stored, RUN, never=(f"{sees.body}.layers.", "lm_head."))
    attend_by(module, sees.body, RUN)
    kept = _kept(module, sees.body, sees.top)
    place(seeing_part(module, sees.body, sees.top), device)
    loaded.add(kept)
    return BridgedEncoder(module, sees.body, sees.top)


def _kept(module: Module, body: str, top: str) -> list[torch.Tensor]:
    """The tensors of what sees, with the table of tokens and without layers of text."""
    module.get_submodule(body).layers = torch.nn.ModuleList()
    part = seeing_part(module, body, top)
    return [*part.parameters(), *part.buffers()]


def _short(text: Text) -> dict[str, Any]:
    """With one layer of text: transformers builds a module whole, and its language model is not what runs."""
    own = text.whole[text.key] if text.key else text.whole
    kinds = {name: own[name][:1] for name in ("layer_types", "layers_block_type", "mlp_layer_types") if own.get(name)}
    short = {**own, "num_hidden_layers": 1, **kinds}
    return {**text.whole, text.key: short} if text.key else short
