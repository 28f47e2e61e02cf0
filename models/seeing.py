"""Native decoders under transformers' vision towers: the text part of a checkpoint that sees, and the encoder beside it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from pagoda.hal.device import Device
from pagoda.models.bridge.encoder import BridgedEncoder, media_facts, seeing_part
from pagoda.models.bridge.interface import ASK, RUN, register
from pagoda.models.bridge.kinds import bridged_class
from pagoda.models.bridge.load import filled_module, place
from pagoda.models.bridge.module import Module, attend_by, body_paths, hollow_module
from pagoda.models.family import Family
from pagoda.models.loaded import Loaded
from pagoda.models.loading.dummy_source import DummySource
from pagoda.models.loading.open import Checkpoint
from pagoda.models.media import Encoder, MediaFacts
from pagoda.models.registry import families
from pagoda.models.views import Renamed
from pagoda.models.weights import WeightSource
from pagoda.quant.format import StoredTensor

TEXTS = ("qwen3_5_text", "qwen3_5_moe_text", "llama4_text", "nemotron_h", "opt")
"""Language models that run natively under images: those that transformers' modules cannot run on pages."""

_NAMES = tuple((re.compile(pattern), new) for pattern, new in (
    (r"^(?:language_model\.)?lm_head\.", "lm_head."),
    (r"^language_model\.(?=backbone\.|model\.decoder\.)", ""),
    (r"^(?:model\.language_model\.|language_model\.model\.)", "model."),
))  # fmt: skip
_LATER = re.compile(r"language_model\..*layers\.[1-9]")


@dataclass(frozen=True)
class Seeing:
    """What stands before a language model.

    Attributes:
        config: the checkpoint's, whose language model has one layer, which never runs. stored: tensors under the checkpoint's names.
        body: path of the language model. top: of what puts media before it.
        nbytes: of the encoder's weights.
    """

    config: Mapping[str, Any]
    stored: Mapping[str, StoredTensor]
    body: str
    top: str
    media: MediaFacts
    nbytes: int


def text_family(config: Mapping[str, Any]) -> Family | None:
    """The family of the language model in a config.json that sees; None where it is to run by the bridge."""
    text = config.get("text_config")
    kind = text.get("model_type") if isinstance(text, Mapping) else None
    return next((family for family in families() if kind in TEXTS and kind in family.model_types), None)


def text_checkpoint(checkpoint: Checkpoint, family: Family) -> Checkpoint:
    """The language model alone, under the names that its family knows."""
    text = {**checkpoint.config["text_config"], "architectures": [family.architectures[0]]}
    if "tie_word_embeddings" in checkpoint.config:
        text["tie_word_embeddings"] = checkpoint.config["tie_word_embeddings"]
    opened = checkpoint.open
    return replace(checkpoint, config=text, open=None if opened is None else lambda: TextSource(opened()))


class TextSource:
    """Implements `WeightSource`: the tensors of the language model of `source`."""

    def __init__(self, source: WeightSource) -> None:
        self._source, self.naming = source, source.naming

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        names = {name: _text_name(name) for name in self._source.tensors}
        return {new: Renamed(new, self._source.tensors[old]) for old, new in names.items() if new is not None}

    def close(self) -> None:
        self._source.close()


def _text_name(name: str) -> str | None:
    return next((pattern.sub(new, name) for pattern, new in _NAMES if pattern.match(name)), None)


def seeing(checkpoint: Checkpoint, dtype: str, width: int) -> Seeing:
    """What stands before the language model of `width`. Raises `ModelError` for what a step of several requests would get wrong."""
    register()
    config = _short(checkpoint.config)
    module = hollow_module(bridged_class(config), config, dtype, ASK)
    body, top = body_paths(module)[0]
    media = media_facts(module, body, width)
    assert media is not None
    source = checkpoint.open() if checkpoint.open is not None else None
    stored = {name: tensor for name, tensor in source.tensors.items() if not _LATER.search(name)} if source is not None else {}
    return Seeing(config, stored, body, top, media, sum(tensor.nbytes for tensor in _kept(module, body, top)))


def load_encoder(sees: Seeing, dtype: str, device: Device, loaded: Loaded, seed: int = 0) -> Encoder | None:
    """The encoder with its weights, which `loaded` counts; None on a device without numbers."""
    if device.torch_device.type == "meta":
        return None
    register()
    stored = sees.stored
    if not stored:
        hollow = hollow_module(bridged_class(sees.config), sees.config, dtype, RUN)
        stored = DummySource(((name, tuple(t.shape), dtype) for name, t in hollow.state_dict().items()), seed).tensors
    module = filled_module(sees.config, "tokens", dtype, stored, RUN)
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


def _short(config: Mapping[str, Any]) -> dict[str, Any]:
    """With one layer of text: transformers builds a module whole, and its language model is not what runs."""
    text = dict(config["text_config"])
    kinds = {name: text[name][:1] for name in ("layer_types", "layers_block_type") if text.get(name)}
    return {**config, "text_config": {**text, "num_hidden_layers": 1, **kinds}}
