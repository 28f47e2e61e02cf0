"""One executable step: captured, traced or eager, in buckets of sizes."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, runtime_checkable

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


@dataclass(frozen=True)
class GraphPolicy:
    """How steps are made executable here.

    Attributes:
        mode: "eager" runs the callable as it is, "captured" records and replays it, "traced" compiles it.
        token_buckets: token counts that a step is padded to, ascending; empty means no padding.
        row_buckets: request counts that a step is padded to, ascending; empty means no padding.
        static_shapes: every step must be padded to a bucket, prefill too.
        prompt_tokens, prompt_rows: sizes that steps with prompts are padded to where shapes are not static, each captured when it is met
            again; empty means that such steps run as they are.
        shared: decode steps have a second form for rows that share a beginning, which attention then reads once.
        at_start: capture ahead of need: with static shapes all buckets before the first request, otherwise those that a first answer needs,
            and the others while there is nothing else to do; a step whose bucket is not captured goes to a larger one or runs as it is. Not
            at start: each bucket is captured when it is first needed.
        burst: decode steps that may be replayed one after the other, their inputs brought by copies between them, before the host
            looks at what they gave; 1: none.
    """

    mode: Literal["eager", "captured", "traced"] = "eager"
    token_buckets: tuple[int, ...] = ()
    row_buckets: tuple[int, ...] = ()
    static_shapes: bool = False
    prompt_tokens: tuple[int, ...] = ()
    prompt_rows: tuple[int, ...] = ()
    shared: bool = False
    at_start: bool = True
    burst: int = 1

    def token_bucket(self, tokens: int) -> int:
        """The size that a step of `tokens` tokens is padded to (itself where no bucket fits)."""
        return _bucket(self.token_buckets, tokens)

    def row_bucket(self, rows: int) -> int:
        """The number of request rows that a step of `rows` requests is padded to."""
        return _bucket(self.row_buckets, rows)


def _bucket(sizes: tuple[int, ...], wanted: int) -> int:
    return next((size for size in sizes if size >= wanted), wanted)


class Replay(Protocol):
    """A step that can be run again after its inputs were changed in place."""

    nbytes: int

    def __call__(self) -> Any:
        """Run it; returns the same output objects each time, their content replaced."""
        ...


class Graphs(Protocol):
    """A device's way to make steps executable."""

    policy: GraphPolicy

    def capture(self, key: Hashable, fn: Callable[..., Any], inputs: tuple[torch.Tensor, ...]) -> Replay:
        """Make `fn(*inputs)` replayable. `inputs` keep their addresses; `key` names the bucket. Raises `DeviceError`.

        `fn` may run on the way, once or more: what it changes in place must bear that, or be put back afterwards.
        """
        ...


@runtime_checkable
class Pieces(Protocol):
    """Graphs whose captured step may have parts that run as they are, between captured pieces."""

    def cut(self, work: Callable[[], T]) -> T:
        """Inside the `fn` of a `capture`: end the piece, run `work` now and at this place of every replay, and begin the next piece.

        The tensors in its result keep their addresses: later runs write into those of the first. It sees what the pieces before it
        computed, in a capture too. Outside a capture it is run, once.
        """
        ...
