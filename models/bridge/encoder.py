"""The vision side of a transformers module: what stands before its language model, run for one item at a time.

Whatever the model does with pixels and placeholders happens in its own forward; that ends where the language model would begin, with the
embeddings that it would have got.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from pagoda.hal.errors import ModelError
from pagoda.models.bridge.module import Module
from pagoda.models.media import EncoderInput, MediaFacts

PIXELS = "get_image_features"

BOTH_WAYS, BOUNDED = ("paligemma", "molmo2"), ("gemma3", "shieldgemma2")
"""Model types in which tokens of an image see each other in both directions; `BOUNDED`: within the window of each layer."""
OTHERS = ("gemma3n", "gemma4_unified", "diffusion_gemma", "pi0")
"""Model types whose masks depend on where images lie in ways that no reference here shows."""

EXPERTS_BY_KIND = "moe_mm_token_type_ids"
"""By which some language models have other experts for an image's tokens."""

MORE = {"mm_token_type_ids", "moe_mm_token_type_ids", "token_type_ids", "per_layer_inputs", "cross_attention_states"}
"""What a language model may be told of images beside their embeddings, and is not by a step."""


class Reached(Exception):
    """The language model was called, with these arguments."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        super().__init__()
        self.arguments = arguments


class BridgedEncoder:
    """Implements `media.Encoder`.

    Args:
        body: path of the language model. top: of the module that puts media before it.
    """

    def __init__(self, module: Module, body: str, top: str) -> None:
        self._body, self._top = module.get_submodule(body), seeing_part(module, body, top)

    def forward(self, items: Sequence[EncoderInput]) -> list[torch.Tensor]:
        """See `Encoder.forward`."""
        return [self._one(item) for item in items]

    def _one(self, item: EncoderInput) -> torch.Tensor:
        ids = item.token_ids.long()[None]
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
        try:
            with _stopped(self._body):
                self._top(input_ids=ids, position_ids=positions, use_cache=False, **item.tensors)
        except Reached as reached:
            return _rows(reached.arguments)
        raise ModelError(f"{type(self._top).__name__} made no embeddings of an image: it never called its language model")


def media_facts(module: Module, body: str, width: int) -> MediaFacts | None:
    """Of a module whose language model lies at `body`; None where there is nothing before it."""
    parent = parent_of(module, body)
    if not (hasattr(parent, PIXELS) or hasattr(module, PIXELS)):
        return None
    _check(module, body)
    levels = len(getattr(getattr(module.config, "vision_config", None), "deepstack_visual_indexes", None) or ())
    axes = _axes(module.config) if hasattr(parent, "get_rope_index") else 1
    return MediaFacts(("image",), width * (1 + levels), axes, both_ways(module.config))


def both_ways(config: Any) -> bool:
    """Whether tokens of an image see each other in both directions."""
    return config.model_type in (*BOTH_WAYS, *BOUNDED)


def takes_layer_inputs(body: Module) -> bool:
    """Whether each layer gets something of the tokens themselves."""
    return bool(getattr(body.config, "hidden_size_per_layer_input", None)) and hasattr(body, "get_per_layer_inputs")


def _axes(config: Any) -> int:
    """Sections of the rotary positions."""
    rope = getattr(config.get_text_config(decoder=True), "rope_parameters", None) or {}
    return len(rope.get("mrope_section") or (0, 0, 0))


def _check(module: Module, body: str) -> None:
    """Raises `ModelError` for what a step of several requests would get wrong."""
    name, kind = type(module).__name__, module.config.model_type
    settings = module.config.get_text_config(decoder=True)
    by_images = getattr(settings, "use_bidirectional_attention", None) == "vision"
    if kind in OTHERS or by_images or (kind in BOTH_WAYS and getattr(settings, "sliding_window", None)):
        raise ModelError(f"what tokens of an image see in transformers' {name} is not known here, and might be served wrong")
    asked = sorted(set(inspect.signature(module.get_submodule(body).forward).parameters) & MORE)
    if (asked == ["per_layer_inputs"] and kind.startswith("gemma4")) or asked == [EXPERTS_BY_KIND]:
        return
    if asked:
        raise ModelError(f"the language model of transformers' {name} asks for {', '.join(asked)} beside embeddings of an image")


def seeing_part(module: Module, body: str, top: str) -> Any:
    """The module whose forward takes an image: where nothing stands between it and the language model, the whole."""
    return module if body == top else module.get_submodule(top)


def parent_of(module: Module, body: str) -> Any:
    """What puts media before the language model at `body`."""
    return module.get_submodule(body.rpartition(".")[0])


@contextmanager
def _stopped(body: Any) -> Iterator[None]:
    """A call of `body` raises `Reached` meanwhile."""

    def reached(*arguments: Any, **options: Any) -> Any:
        raise Reached(options)

    body.forward = reached
    try:
        yield
    finally:
        del body.forward


def _rows(arguments: dict[str, Any]) -> torch.Tensor:
    embeds: torch.Tensor = arguments["inputs_embeds"][0]
    levels = arguments.get("deepstack_visual_embeds")
    if levels is None:
        return embeds
    seen = arguments["visual_pos_masks"][0]
    return torch.cat([embeds, *(embeds.new_zeros(embeds.shape).masked_scatter(seen[:, None], level) for level in levels)], dim=-1)
