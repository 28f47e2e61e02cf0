"""One request's deltas on their way to its reader: what came while the reader was busy is handed over as one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from pagoda.hal.errors import PagodaError
from pagoda.serving.engine.messages import RequestDelta, SequenceDelta

Piece = int | RequestDelta
"""A plain token of a request's only sequence, or a delta."""


PATIENCE = 256
"""Plain tokens that a patient reader is not woken for: more at once would hold up others in its loop."""


class Mailbox:
    """Written and read in one asyncio loop, by one reader. A patient one is not woken for a few plain tokens: they come with the next
    delta."""

    __slots__ = ("_error", "_patient", "_pieces", "_reader", "_ready", "_request_id")

    def __init__(self, request_id: str, patient: bool = False) -> None:
        self._request_id = request_id
        self._patient = patient
        self._ready = False
        self._pieces: list[Piece] = []
        self._error: PagodaError | None = None
        self._reader: asyncio.Future[None] | None = None

    def put(self, piece: Piece) -> None:
        self._pieces.append(piece)
        if self._patient and isinstance(piece, int) and len(self._pieces) < PATIENCE:
            return
        self._ready = True
        if self._reader is not None:
            self._wake(self._reader)

    def fail(self, error: PagodaError) -> None:
        """The reader gets this next, whatever was there before."""
        self._error = error
        if self._reader is not None:
            self._wake(self._reader)

    async def take(self) -> RequestDelta:
        """All that has come, at least one piece; raises what `fail` was given."""
        while self._error is None and not self._ready:
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        if self._error is not None:
            raise self._error
        pieces, self._pieces, self._ready = self._pieces, [], False
        return merge(self._request_id, pieces)

    @staticmethod
    def _wake(reader: asyncio.Future[None]) -> None:
        if not reader.done():
            reader.set_result(None)


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
        pooled=piece.pooled or whole.pooled,
        queued=max(whole.queued, piece.queued),
    )


def _continued(old: SequenceDelta | None, new: SequenceDelta) -> SequenceDelta:
    if old is None or old.logprobs is None:
        return new
    return replace(new, logprobs=(*old.logprobs, *(new.logprobs or ())))
