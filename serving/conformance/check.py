"""What a level is made of: checks, and the device they run on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

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


class Check(NamedTuple):
    """One question: `run(target)` returns a sentence for the report (or nothing), or raises."""

    level: int
    name: str
    run: Callable[[Target], str | None]


def expect(condition: bool, otherwise: str) -> None:
    """Raise `FailedError(otherwise)` unless `condition`."""
    if not condition:
        raise FailedError(otherwise)
