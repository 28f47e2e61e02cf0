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
from pagoda.models.bridge.module import EXTENDS, Module
from pagoda.models.media import EncoderInput, MediaFacts

TAKES = {
    "image": ("get_image_features", "image_to_text_projection", EXTENDS), "video": ("get_video_features",),
    "audio": ("get_audio_features", EXTENDS),
}  # fmt: skip
"""By which a module is known that takes something beside tokens."""
NO_TOKEN = -1
"""In the place of the token that stands for what a model was not made for, though its code is."""

BOTH_WAYS, BOUNDED = ("paligemma", "molmo2"), ("gemma3", "shieldgemma2")
"""Model types in which tokens of an image see each other in both directions; `BOUNDED`: within the window of each layer."""
OTHERS = ("gemma4_unified", "diffusion_gemma", "pi0")
"""Model types whose masks depend on where images lie in ways that no reference here shows."""
TEXT_ALONE = ("gemma3n",)
"""Those whose images no reference here shows; a text is served."""

EXPERTS_BY_KIND = "moe_mm_token_type_ids"
"""By which some language models have other experts for an image's tokens."""

MORE = {"mm_token_type_ids", "moe_mm_token_type_ids", "token_type_ids", "per_layer_inputs", "cross_attention_states"}
"""What a language model may be told of images beside their embeddings, and is not by a step."""


class Reached(Exception):
    """The language model was called, with these arguments."""


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
        if hasattr(self._body, EXTENDS):
            embeds: torch.Tensor = getattr(self._body, EXTENDS)(ids, self._body.embed_tokens(ids), **item.tensors)
            return embeds[0]
        try:
            with _stopped(self._body):
                self._top(input_ids=ids, position_ids=positions, use_cache=False, **item.tensors)
        except Reached as reached:
            return _rows(reached.args[0])
        raise ModelError(f"{type(self._top).__name__} made no embeddings of an image: it never called its language model")


def media_facts(module: Module, body: str, width: int) -> MediaFacts | None:
    """Of a module whose language model lies at `body`; None where there is nothing before it."""
    parent = parent_of(module, body)
    places = (parent, module, module.get_submodule(body))
    able = (kind for kind, names in TAKES.items() if any(hasattr(part, name) for part in places for name in names))
    taken = tuple(kind for kind in able if getattr(module.config, f"{kind}_token_id", 0) != NO_TOKEN)
    if not taken or module.config.model_type in TEXT_ALONE:
        return None
    _check(module, body)
    levels = len(getattr(getattr(module.config, "vision_config", None), "deepstack_visual_indexes", None) or ())
    axes = _axes(module.config) if hasattr(parent, "get_rope_index") else 1
    return MediaFacts(taken, width * (1 + levels), axes, both_ways(module.config))


def both_ways(config: Any) -> bool:
    """Whether tokens of an image see each other in both directions."""
    return config.model_type in (*BOTH_WAYS, *BOUNDED)


def told_of_media(body: Module, width: int, ids: torch.Tensor, rows: torch.Tensor, values: torch.Tensor) -> dict[str, Any]:
    """A language model's arguments for tokens `[T]`, where the embeddings `values` stand for those at `rows`."""
    embeds = body.get_input_embeddings()(ids)
    first, *levels = values.to(embeds.dtype).split(width, dim=-1)
    options: dict[str, Any] = {"inputs_embeds": embeds.index_copy(0, rows, first)[None]}
    if levels:
        seen = torch.zeros(len(embeds), dtype=torch.bool, device=embeds.device).index_fill_(0, rows, True)
        options |= {"visual_pos_masks": seen[None], "deepstack_visual_embeds": levels}
    taken = inspect.signature(body.forward).parameters
    if "ple_input_ids" in taken:
        options["ple_input_ids"] = ids[None]
    if EXPERTS_BY_KIND in taken:
        options[EXPERTS_BY_KIND] = torch.zeros_like(ids).index_fill_(0, rows, 1)[None]
    if getattr(body.config, "hidden_size_per_layer_input", None) and hasattr(body, "get_per_layer_inputs"):
        # What each layer gets of the tokens themselves: images are padding to it.
        pad = body.config.pad_token_id
        embeds = embeds.index_copy(0, rows, body.embed_tokens.weight[pad].expand(len(rows), -1).to(embeds.dtype))
        options["per_layer_inputs"] = body.get_per_layer_inputs(ids.index_fill(0, rows, pad)[None], embeds[None])
    return options


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
    return module if body == top and not hasattr(module.get_submodule(body), EXTENDS) else module.get_submodule(top)


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
    if "image_embeds" in arguments:  # put into their places by the language model
        rows: torch.Tensor = arguments["image_embeds"].flatten(0, 1)
        return rows.new_zeros(len(seen := arguments["image_embeds_position_mask"][0]), rows.shape[1]).masked_scatter(
            seen[:, None] > 0, rows
        )
    embeds: torch.Tensor = arguments["inputs_embeds"][0]
    levels = arguments.get("deepstack_visual_embeds")
    if levels is None:
        return embeds
    seen = arguments["visual_pos_masks"][0]
    return torch.cat([embeds, *(embeds.new_zeros(embeds.shape).masked_scatter(seen[:, None], level) for level in levels)], dim=-1)
