"""What a frontend must know of a model with media: where they lie in a prompt's tokens, and those tokens' positions. Needs no weights."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from pagoda.hal.errors import ConfigError, RequestError
from pagoda.models.bridge.encoder import both_ways, parent_of, seeing_part
from pagoda.models.bridge.interface import ASK, register
from pagoda.models.bridge.kinds import bridged_class
from pagoda.models.bridge.module import EXTENDS, body_paths, hollow_module, transformers
from pagoda.models.loading.respelled import respelled
from pagoda.models.media import MediaItem, MediaPositions, digest_of
from pagoda.models.media_tensors import numbers_of

PLACEHOLDER = re.compile(r"^(image|video|img|vision|audio)_(token|patch|context|pad)?_?(token_)?(id|index)$")
"""Names under which configurations keep the ids of tokens that stand for parts of an image, a video or a sound."""
KINDS = {"img": "image", "vision": "image"}
"""Other words for a modality."""
NUMBERS = {"image": 1, "video": 2, "audio": 3}
"""What `mm_token_type_ids` calls them."""

PER_TOKEN = ("token_type_ids", "position_mask")
"""Ends of the names of tensors that have a number for each token of the prompt."""


class MediaReader:
    """Of one model."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        register()
        config = respelled(config)
        module = hollow_module(bridged_class(config), config, "float32", ASK)
        body, top = body_paths(module)[0]
        self._parent = parent_of(module, body)
        self._taken = set(inspect.signature(seeing_part(module, body, top).forward).parameters)
        self._placeholders = _placeholders(module.config)
        self._whole, self._extends = both_ways(module.config), hasattr(module.get_submodule(body), EXTENDS)
        self._prefix, self._joint = module.config.model_type == "paligemma", module.config.model_type == "molmo2"

    def read(self, ids: Sequence[int], tensors: Mapping[str, torch.Tensor]) -> tuple[tuple[MediaItem, ...], MediaPositions | None]:
        """Items of a prompt's ids, and their positions where the model has several a token.

        Args:
            ids: with all placeholders. tensors: what transformers' processor made beside them.

        Raises `RequestError` where no token stands for an image.
        """
        if (grid := tensors.get("image_grid_hws")) is not None:  # of images alone
            tensors = {**tensors, "image_grid_thw": torch.nn.functional.pad(grid, (1, 0), value=1)}
        places = {index: self._placeholders[token] for index, token in enumerate(ids) if token in self._placeholders}
        types = tensors.get("moe_mm_token_type_ids", tensors.get("image_embeds_position_mask", tensors.get("mm_token_type_ids")))
        if types is not None:
            marked = {index: places.get(index, "image") for index in types[0].nonzero()[:, 0].tolist()}
            places = marked if "image_embeds_position_mask" in tensors else {**marked, **places}
        taken = {name: tensor for name, tensor in tensors.items() if name in self._taken and name not in ("input_ids", "attention_mask")}
        brought = {modality_of(name) for name in taken if not name.endswith(PER_TOKEN)}
        if len(brought) == len({*places.values()}) == 1:  # some have one placeholder for all kinds
            places = dict.fromkeys(places, *brought)
        if not places or not brought <= {*places.values()}:
            lacking = ", ".join(sorted(brought - {*places.values()})) or "image"
            raise RequestError(f"no token of the prompt stands for the {lacking}; put the model's placeholder into it", param="prompt")
        if self._prefix:  # the whole prompt is seen from each of its tokens
            return (_item("image", ids, 0, len(ids), taken),), self._positions(ids, tensors)
        if self._extends and len(brought) > 1:  # what is heard beside an image is projected otherwise
            return (_item("image", ids, min(places), max(places) + 1, taken),), None
        items = [item for kind in dict.fromkeys(places.values()) if kind in brought for item in self._items(kind, ids, places, taken)]
        items.sort(key=lambda item: item.offset)
        if any(before.end > after.offset for before, after in pairwise(items)):
            raise RequestError("media of several kinds stand between the parts of one; put them one after another", param="prompt")
        return tuple(items), self._positions(ids, tensors)

    def _items(self, kind: str, ids: Sequence[int], places: Mapping[int, str], tensors: Mapping[str, torch.Tensor]) -> list[MediaItem]:
        """Those of one modality."""
        runs = _runs(sorted(index for index, name in places.items() if name == kind))
        own = {name: tensor for name, tensor in tensors.items() if name.endswith(PER_TOKEN) or modality_of(name) == kind}
        parts = _split(own, len(runs))
        if self._whole and len(runs) > 1 and (parts is None or self._joint):
            raise RequestError(f"this model takes one {kind} a prompt here: several see each other", param="prompt")
        if parts is None:  # all of them as one item, with the text between them
            runs, parts = [(runs[0][0], runs[-1][1])], [own]
        return [_item(kind, ids, first, end, part) for (first, end), part in zip(runs, parts, strict=True)]

    def _positions(self, ids: Sequence[int], tensors: Mapping[str, torch.Tensor]) -> MediaPositions | None:
        if not hasattr(self._parent, "get_rope_index"):
            return None
        tokens = torch.tensor([list(ids)])
        kinds = torch.tensor([[NUMBERS.get(self._placeholders.get(token, ""), 0) for token in ids]], dtype=torch.int32)
        given = {"mm_token_type_ids": kinds, **tensors, "input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        wanted = inspect.signature(self._parent.get_rope_index).parameters
        values, delta = self._parent.get_rope_index(**{name: given[name] for name in wanted if name in given})
        return MediaPositions(numbers_of(values[:, 0].long()), int(delta.flatten()[0]))


def modality_of(name: str) -> str:
    """What a tensor of a processor is of, by its name."""
    if "video" in name or name == "second_per_grid_ts":
        return "video"
    return "audio" if "audio" in name or name.startswith(("input_features", "feature_")) else "image"


def _item(kind: str, ids: Sequence[int], first: int, end: int, tensors: Mapping[str, torch.Tensor]) -> MediaItem:
    cut = {name: t[:, first:end] if name.endswith(PER_TOKEN) else t for name, t in tensors.items()}
    numbers = {name: numbers_of(tensor) for name, tensor in cut.items()}
    return MediaItem(kind, digest_of(kind, ids[first:end], numbers), first, end - first, numbers)


def _runs(places: Sequence[int]) -> list[tuple[int, int]]:
    """Stretches of neighbouring places, as first and end."""
    cuts = [index for index in range(1, len(places)) if places[index] != places[index - 1] + 1]
    bounds = [0, *cuts, len(places)]
    return [(places[low], places[high - 1] + 1) for low, high in pairwise(bounds)]


def _split(tensors: Mapping[str, torch.Tensor], count: int) -> list[dict[str, torch.Tensor]] | None:
    """The tensors of each of `count` images, or None where they do not fall apart into so many."""
    grid = tensors.get("image_grid_thw", tensors.get("video_grid_thw"))
    sizes = grid.prod(-1).tolist() if grid is not None and len(grid) == count else None
    columns: dict[str, Sequence[torch.Tensor]] = {}
    for name, tensor in tensors.items():
        if name.endswith(PER_TOKEN):
            columns[name] = [tensor] * count
        elif sizes is not None and name in ("pixel_values", "pixel_values_videos") and len(tensor) == sum(sizes):
            columns[name] = tensor.split(sizes)
        elif len(tensor) == count:
            columns[name] = tensor.split(1)
        elif tensor.dim() > 1 and tuple(tensor.shape[:2]) == (1, count):
            columns[name] = tensor.split(1, dim=1)
        else:
            return None
    return [dict(zip(columns, parts, strict=True)) for parts in zip(*columns.values(), strict=True)]


def own_processor(folder: Path) -> Any:
    """transformers' processor of a model folder. Raises `ConfigError` where it cannot be made."""
    try:
        return transformers().AutoProcessor.from_pretrained(folder, local_files_only=True)
    except (ImportError, OSError, ValueError) as error:
        raise ConfigError(f"the processor of {folder.name}, which images need, cannot be loaded: {error}") from error


def _placeholders(config: Any) -> dict[int, str]:
    """Modalities by the ids that stand for them."""
    values = config.to_dict()
    parts = (values, *(part for part in values.values() if isinstance(part, dict)))
    named = ((PLACEHOLDER.match(name), value) for part in parts for name, value in part.items() if isinstance(value, int))
    return {value: KINDS.get(match[1], match[1]) for match, value in reversed(list(named)) if match is not None}
