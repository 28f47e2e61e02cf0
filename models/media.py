"""Media in a prompt: what a request brings for each item, what a model says it takes, and the seam to encoders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch


EMBEDS = "embeds"
"""Modality of items that bring their embeddings themselves, as the tensor of this name."""


@dataclass(frozen=True)
class Numbers:
    """A tensor as it crosses between processes: raw bytes in C order, `dtype` by its numpy name."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


@dataclass(frozen=True)
class MediaItem:
    """One image, or whatever else an encoder turns into rows of embeddings.

    Attributes:
        modality: "image", "video", "audio" or `EMBEDS`.
        digest: of the content (`digest_of`): items with equal digests have equal embeddings and may share pages.
        offset, length: the stretch of the prompt's tokens that the embeddings replace, one row a token.
        tensors: what the encoder takes, by the names that transformers' processors give (pixel_values, image_grid_thw, …).
    """

    modality: str
    digest: bytes
    offset: int
    length: int
    tensors: dict[str, Numbers] = field(default_factory=dict)

    @property
    def end(self) -> int:
        return self.offset + self.length


@dataclass(frozen=True)
class MediaPositions:
    """Positions of a prompt with media for models that have several a token.

    Attributes:
        values: `[axes, tokens]` int64.
        delta: what the position of a token after the prompt is beyond its index.
    """

    values: Numbers
    delta: int


@dataclass(frozen=True)
class MediaFacts:
    """What a model with an encoder is, before its weights load.

    Attributes:
        modalities: what it takes.
        row_width: numbers of one embedding row: the model's width, and as many again for each level added in deeper layers.
        axes: positions per token.
        whole: tokens of an item see each other in both directions, so that a step holds all of them.
    """

    modalities: tuple[str, ...]
    row_width: int
    axes: int = 1
    whole: bool = False


class EncoderInput(NamedTuple):
    """An item on the device: ids of the tokens that it stands for `[n]`, and its tensors."""

    token_ids: torch.Tensor
    tensors: Mapping[str, torch.Tensor]


class Encoder(Protocol):
    """What turns items into embeddings: a vision tower with its projector."""

    def forward(self, items: Sequence[EncoderInput]) -> list[torch.Tensor]:
        """Of each item `[n, row_width]` in the model's dtype, a row for each of its tokens."""
        ...


def digest_of(modality: str, tokens: Sequence[int], tensors: Mapping[str, Numbers]) -> bytes:
    """Over all that an encoder sees of an item."""
    digest = blake2b(repr((modality, tuple(tokens))).encode(), digest_size=16)
    for name in sorted(tensors):
        one = tensors[name]
        digest.update(repr((name, one.dtype, one.shape)).encode())
        digest.update(one.data)
    return digest.digest()
