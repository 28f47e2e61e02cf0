"""Where KV pages go and come from beside the pool: host memory, disk, another engine. One protocol, `CacheConnector`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol


class PageJob(NamedTuple):
    """Units of a hash chain and the pages that hold them.

    Attributes:
        key: names the job, unique among those not done.
        digests: one per unit (`PrefixIndex.unit` tokens); a digest stands for the whole prefix up to its unit, salt and adapter included.
        pages: per unit, per cache group, the page ids of that unit.
    """

    key: int
    digests: tuple[bytes, ...]
    pages: tuple[tuple[tuple[int, ...], ...], ...]


class Loaded(NamedTuple):
    """A load that ended: the first `units` of its job are in their pages; fewer than asked where something failed."""

    key: int
    units: int


class CacheConnector(Protocol):
    """The scheduler's side of a store of pages; called from the engine's loop, so nothing here may block.

    No step in flight reads or writes the pages of a `load`. `save` has read its pages before any step planned after the call writes
    them (its copies are ordered with the steps on the ranks). Whoever completes a load wakes the loop, which then asks `done`.
    """

    def match(self, digests: Sequence[bytes], have: int) -> int:
        """How many units from the chain's start could be in pages: `have` are already, the store holds the ones after."""
        ...

    def load(self, job: PageJob) -> None:
        """Begin to bring the job's units into its pages. Nobody else touches these until `done` names the job."""
        ...

    def save(self, job: PageJob) -> None:
        """Keep a copy of these units; one that the store has, or has no room for, is skipped. Not answered by `done`."""
        ...

    def done(self) -> Iterable[Loaded]:
        """Loads that ended since the last call."""
        ...
