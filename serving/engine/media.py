"""Media in the scheduler: which items a step encodes, where their embeddings lie, and how far prompts may go meanwhile.

The ranks keep embeddings in one store of rows. What lies where is decided here: an item's rows are found again by its content, and given
to others when room is needed, those that were used longest ago first. No request holds rows: one that needs them again has them made again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from pagoda.hal.errors import CapacityError, RequestError
from pagoda.models.media import EMBEDS, MediaItem
from pagoda.serving.engine.messages import EngineRequest
from pagoda.serving.engine.plan import EncodeJob, IntArray, LongArray, MediaPlan, RunnerFacts
from pagoda.serving.engine.slots import Slots


class Store(NamedTuple):
    """Of the ranks: `rows` of embeddings that they keep, `per_step`, most that one step makes, `whole` and `axes` (`MediaFacts`)."""

    rows: int
    per_step: int
    whole: bool
    axes: int = 1

    @staticmethod
    def of(facts: RunnerFacts, budget: int) -> Store:
        """`budget`: tokens of a step; encoders may make as many embeddings."""
        assert facts.media is not None
        return Store(facts.media_rows, budget, facts.media.whole, facts.media.axes)


@dataclass
class MediaDesk:
    """One replica's. `clip` is asked for each row with media of a step that is planned, then `plan` once."""

    store: Store
    slots: Slots
    _held: OrderedDict[bytes, LongArray] = field(default_factory=OrderedDict)
    _used: set[bytes] = field(default_factory=set)
    _jobs: list[EncodeJob] = field(default_factory=list)
    _made: int = 0

    def __post_init__(self) -> None:
        self._free = np.arange(self.store.rows, dtype=np.int64)

    def clip_running(self, order: IntArray, starts: IntArray, want: IntArray) -> IntArray:
        """`want` tokens of these slots, or fewer where embeddings are not there and cannot be made in this step."""
        for row in np.flatnonzero((self.slots.media[order] > starts) & (want > 0)).tolist():
            request = self.slots.sequence(int(order[row])).request.source
            want[row] = self.clip(request, int(starts[row]), int(want[row]))
        return want

    def clip(self, request: EngineRequest, start: int, count: int) -> int:
        """The same for one request, from its token `start` on."""
        for item in request.media:
            if item.offset >= start + count:
                break
            if item.end <= start:
                continue
            cut = self.store.whole and item.modality != EMBEDS and start + count < item.end
            if cut or not self._have(request, item):
                return max(item.offset - start, 0)
        return count

    def plan(self, slots: IntArray, starts: IntArray, counts: IntArray) -> MediaPlan | None:
        """What the ranks are told of a step's rows; None where no row needs embeddings."""
        ends = np.cumsum(counts)
        rows, sources, spans = [], [], []
        for row in np.flatnonzero(self.slots.media[slots] > starts).tolist():
            start, count, first = int(starts[row]), int(counts[row]), int(ends[row] - counts[row])
            for item in self.slots.sequence(int(slots[row])).request.source.media:
                low, high = max(item.offset, start), min(item.end, start + count)
                if low < high:
                    rows.append(np.arange(first + low - start, first + high - start))
                    sources.append(self._held[item.digest][low - item.offset : high - item.offset])
                    spans.append(_spans(item, low, high))
        jobs, self._jobs, self._made = tuple(self._jobs), [], 0
        self._used.clear()
        if not rows and not jobs:
            return None
        none = np.zeros(0, np.int64)
        return MediaPlan(jobs, np.concatenate([none, *rows]), np.concatenate([none, *sources]), np.hstack([none.reshape(2, 0), *spans]))

    def holds(self, digest: bytes) -> bool:
        """Whether this item's embeddings are there."""
        return digest in self._held

    def lose(self, digest: bytes) -> None:
        """An item could not be encoded: its rows hold nothing."""
        rows = self._held.pop(digest, None)
        if rows is not None:
            self._free = np.concatenate([self._free, rows])

    def forget(self) -> None:
        """The ranks' store is empty, or its numbers are void."""
        self._held.clear()
        self._free = np.arange(self.store.rows, dtype=np.int64)

    def check(self, request: EngineRequest, budget: int) -> None:
        """Raises `RequestError` for items that do not lie in the prompt one after another, `CapacityError` for one that is too large."""
        given, wanted = request.positions, (self.store.axes, len(request.prompt))
        if given is not None and given.values.shape != wanted:
            raise RequestError(f"positions of shape {given.values.shape} come with a prompt that takes {wanted}", param="media")
        end = 0
        for item in request.media:
            if item.offset < end or item.length < 1 or item.end > len(request.prompt):
                raise RequestError(f"a media item stands for tokens {item.offset} to {item.end}, of {len(request.prompt)}", param="media")
            end = item.end
            most = min(self.store.rows, budget) if self.store.whole else self.store.rows
            if item.length > most:
                raise CapacityError(
                    f"an {item.modality} of {item.length} tokens is larger than the {most} that a step can take; send a smaller one",
                    asked=item.length,
                    available=most,
                )

    def _have(self, request: EngineRequest, item: MediaItem) -> bool:
        if item.digest in self._held:
            self._held.move_to_end(item.digest)
            self._used.add(item.digest)
            return True
        if (self._jobs and self._waits(item)) or not self._room(item.length):
            return False
        rows, self._free = self._free[: item.length], self._free[item.length :]
        self._held[item.digest] = rows
        self._used.add(item.digest)
        self._made += item.length
        self._jobs.append(EncodeJob(rows, request.prompt[item.offset : item.end], item.tensors, item.digest))
        return True

    def _waits(self, item: MediaItem) -> bool:
        """One after another while others decode: their next token waits for one item, however many came."""
        if self._made + item.length > self.store.per_step:
            return True
        return item.modality != EMBEDS and bool((self.slots.active & (self.slots.total > self.slots.prompt)).any())

    def _room(self, count: int) -> bool:
        """Whether so many rows are free, after taking those of items that no row of this step needs."""
        idle = [digest for digest in self._held if digest not in self._used]
        if len(self._free) + sum(len(self._held[digest]) for digest in idle) < count:
            return False
        for digest in idle:
            if len(self._free) >= count:
                break
            self._free = np.concatenate([self._free, self._held.pop(digest)])
        return True


def _spans(item: MediaItem, low: int, high: int) -> LongArray:
    """`[2, high − low]`: where what each of these tokens sees in both directions begins and ends."""
    if item.modality == EMBEDS:
        return np.stack([np.arange(low, high), np.arange(low + 1, high + 1)])
    return np.repeat([[item.offset], [item.end]], high - low, axis=1)


def marks_of(media: Seq[MediaItem], unit: int) -> dict[int, bytes]:
    """What units of the hash chain depend on beside their tokens: the items that reach into each, and where they begin."""
    marks: dict[int, bytes] = {}
    for item in media:
        for index in range(item.offset // unit, -(-item.end // unit)):
            marks[index] = marks.get(index, b"") + item.digest + (item.offset - index * unit).to_bytes(8, "little", signed=True)
    return marks
