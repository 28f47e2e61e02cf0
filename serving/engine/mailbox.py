"""One request's deltas on their way to its reader: what came while the reader was busy is handed over as one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

from pagoda.hal.errors import PagodaError
from pagoda.serving.engine.messages import RequestDelta, SequenceDelta

Piece = int | RequestDelta
"""A plain token of a request's only sequence, or a delta."""


Plain = Callable[[Sequence[int] | RequestDelta], bool]
"""Takes new tokens on their way to a reader that waits, those of a single sequence alone, and says whether it did; see
`EngineClient.generate`. Keeps no sequence."""

PATIENCE = 256
"""The most `patience` of a reader that shows nothing before the end: more at once would hold up others in its loop."""


class Mailbox:
    """Written and read in one asyncio loop, by one reader. It is woken for the first delta, for ends, and for `patience` tokens of a
    sequence. Whoever writes calls `settle` when there is no more for the moment."""

    __slots__ = ("_deltas", "_enough", "_error", "_pieces", "_plain", "_reader", "_request_id", "_rich", "_urgent", "add_token")

    def __init__(self, request_id: str, patience: int = 1, plain: Plain | None = None) -> None:
        self._request_id = request_id
        self._enough = patience
        self._plain = plain
        self._deltas = self._rich = False  # not tokens alone, or more than new tokens are there
        self._urgent = True
        self._pieces: list[Piece] = []
        self.add_token: Callable[[int], None] = self._pieces.append
        self._error: Exception | None = None
        self._reader: asyncio.Future[None] | None = None

    def add(self, delta: RequestDelta) -> None:
        self._pieces.append(delta)
        self._deltas = True
        if _only_tokens(delta):
            return
        self._rich = True
        self._urgent = self._urgent or delta.finished or any(part.finish_reason is not None for part in delta.sequences)

    def settle(self) -> None:
        """Give what was added to the reader, if it waits and it is enough for it."""
        reader, pieces, plain = self._reader, self._pieces, self._plain
        if reader is None or reader.done() or not (len(pieces) >= self._enough or (self._urgent and pieces)):
            return
        try:
            taken = plain is not None and not self._rich and plain(self._offered() if self._deltas else pieces)  # type: ignore[arg-type]
        except Exception as error:  # the reader raises it: other streams go on
            self._error, taken = error, False
        if taken:
            pieces.clear()
            self._deltas = self._urgent = False
        else:
            self._wake(reader)

    def _offered(self) -> RequestDelta:
        return merge(self._request_id, self._pieces)

    def _due(self) -> bool:
        return len(self._pieces) >= self._enough or (self._urgent and bool(self._pieces))

    def fail(self, error: PagodaError) -> None:
        """The reader gets this next, whatever was there before."""
        self._error = error
        if self._reader is not None:
            self._wake(self._reader)

    async def take(self) -> RequestDelta:
        """All that has come, at least one piece; raises what `fail` was given."""
        while self._error is None and not self._due():
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        if self._error is not None:
            raise self._error
        delta = merge(self._request_id, self._pieces)
        self._pieces.clear()
        self._deltas = self._rich = self._urgent = False
        return delta

    @staticmethod
    def _wake(reader: asyncio.Future[None]) -> None:
        if not reader.done():
            reader.set_result(None)


def _only_tokens(delta: RequestDelta) -> bool:
    """Whether it says nothing but which tokens its sequences have more."""
    if (
        delta.finished
        or delta.cached_tokens
        or delta.prompt_logprobs is not None
        or delta.error
        or delta.pooled is not None
        or delta.queued
    ):
        return False
    return all(part.finish_reason is None and part.logprobs is None for part in delta.sequences)


def merge(request_id: str, pieces: Sequence[Piece]) -> RequestDelta:
    """The pieces as one delta: tokens and logprobs in order, ends as in the last."""
    if len(pieces) == 1:  # what most are
        [only] = pieces
        return only if isinstance(only, RequestDelta) else RequestDelta(request_id, (SequenceDelta(0, (only,)),))
    sequences: dict[int, SequenceDelta] = {}
    tokens: dict[int, list[int]] = {}
    whole = RequestDelta(request_id, ())
    for piece in pieces:
        if isinstance(piece, int):
            tokens.setdefault(0, []).append(piece)
            continue
        whole = _joined(whole, piece)
        for delta in piece.sequences:
            tokens.setdefault(delta.index, []).extend(delta.token_ids)
            sequences[delta.index] = _continued(sequences.get(delta.index), delta)
    return replace(
        whole,
        sequences=tuple(
            replace(sequences[index], token_ids=tuple(ids)) if index in sequences else SequenceDelta(index, tuple(ids))
            for index, ids in sorted(tokens.items())
        ),
    )


def _joined(whole: RequestDelta, piece: RequestDelta) -> RequestDelta:
    return RequestDelta(
        piece.request_id,
        (),
        finished=piece.finished,
        cached_tokens=max(whole.cached_tokens, piece.cached_tokens),
        prompt_logprobs=whole.prompt_logprobs if piece.prompt_logprobs is None else piece.prompt_logprobs,
        error=piece.error or whole.error,
        refused=piece.refused or whole.refused,
        pooled=piece.pooled or whole.pooled,
        queued=max(whole.queued, piece.queued),
    )


def _continued(old: SequenceDelta | None, new: SequenceDelta) -> SequenceDelta:
    if old is None or old.logprobs is None:
        return new
    return replace(new, logprobs=(*old.logprobs, *(new.logprobs or ())))
