"""What an encoder reads before a request's first token: facts of it, and a step's inputs for it."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    import torch
    from pagoda.ops.segment_attention import Segments


class Cut(NamedTuple):
    """One convolution over time, as far as it changes how many frames there are."""

    kernel: int
    stride: int
    padding: int = 0

    def frames(self, count: int) -> int:
        return max((count + 2 * self.padding - self.kernel) // self.stride + 1, 0)


@dataclass(frozen=True)
class EncoderFacts:
    """The encoder of a model whose decoder attends to it.

    Attributes:
        kind: what it reads: token ids ("text"), spectra over time ("frames"), or the sound's own samples ("samples").
        longest: most tokens that it gives.
        vocab: ids at or above are refused. bins: numbers of a frame. log_mel: frames are spectra of Whisper's kind.
        cuts: convolutions over frames or samples before its layers.
        start: ids that a decoder's prompt begins with where nothing else is said, with the one that its answer has to begin with.
    """

    kind: Literal["text", "frames", "samples"]
    longest: int
    vocab: int = 0
    bins: int = 0
    cuts: tuple[Cut, ...] = ()
    start: tuple[int, ...] = ()
    log_mel: bool = False

    @property
    def most(self) -> int:
        """Most ids, frames or samples of one input."""
        return self.longest * prod(cut.stride for cut in self.cuts)

    def tokens(self, count: int) -> int:
        """Tokens that it gives for so many ids, frames or samples."""
        for cut in self.cuts:
            count = cut.frames(count)
        return count


class EncoderBatch(NamedTuple):
    """Inputs that are encoded together.

    Attributes:
        token_ids: `[T]` int64 of a text encoder, all inputs one after another; features: `[bins, frames]` or `[samples]` of each, else.
        positions: `[T]` int64 of the tokens that the encoder gives, from 0 in each input.
        segments: where each input's tokens lie.
        slots: per cache group `[T]` int64, page · page_size + offset where each token's K and V go; None for groups of other kinds.
    """

    token_ids: torch.Tensor | None
    features: tuple[torch.Tensor, ...]
    positions: torch.Tensor
    segments: Segments
    slots: tuple[torch.Tensor | None, ...]
