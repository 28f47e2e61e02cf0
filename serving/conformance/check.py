"""What a level is made of: checks, and the device they run on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from pagoda.hal.device import Backend, Device


class UnclaimedError(Exception):
    """The device does not promise this; the reason is listed."""


class SkippedError(Exception):
    """The device promises this and it could not be shown here; the level does not pass."""


class FailedError(Exception):
    """The device promises this and does otherwise: what was expected, what was found."""


@dataclass(frozen=True)
class Target:
    """The device under test, opened once for all checks of this process."""

    backend: Backend
    device: Device


class Split(NamedTuple):
    """A check in parts that need neither each other nor the device for themselves, so that processes may share them.

    Attributes:
        parts: each `(target) → what it found`, which travels between processes. join: what all found, in order, as `Check.run` says it.
        cost: of a part beside other checks' parts; the dearest are begun first.
    """

    parts: tuple[Callable[[Target], Any], ...]
    join: Callable[[list[Any]], str | None]
    cost: float = 1.0


class Check(NamedTuple):
    """One question: `run(target)` returns a sentence for the report (or nothing), or raises. `split`: the same in parts, if it can be."""

    level: int
    name: str
    run: Callable[[Target], str | None]
    split: Split | None = None


def in_parts(level: int, name: str, split: Split) -> Check:
    """A check that runs one part after the other where nobody shares them."""
    return Check(level, name, lambda target: split.join([part(target) for part in split.parts]), split)


def apart(level: int, name: str, run: Callable[[Target], str | None], cost: float = 1.0) -> Check:
    """A check of one part, which may run in a process beside others."""
    return Check(level, name, run, Split((run,), lambda found: found[0], cost))


def expect(condition: bool, otherwise: str) -> None:
    """Raise `FailedError(otherwise)` unless `condition`."""
    if not condition:
        raise FailedError(otherwise)
