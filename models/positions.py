"""Absolute positions, as data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Learned:
    """Learned absolute positions: row `position + offset` of a table of `rows`."""

    rows: int
    offset: int = 0


@dataclass(frozen=True)
class Sinusoids:
    """Sines, then cosines of position + offset at frequencies from 1 down to 1/10000; `reaching`: which the last one is, not the next."""

    rows: int
    offset: int = 0
    reaching: bool = False
