"""What the engine measures many times and tells as a spread: counts by upper bound, which only grow."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

_SECONDS = (0.001, 0.01, 0.1, 1.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)
BOUNDS: dict[str, tuple[float, ...]] = {
    "iteration_tokens": (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384),
    "request_preemptions": (0, 1, 2, 3, 4, 5, 10, 20),
    "page_lifetime": _SECONDS,
    "page_idle": _SECONDS,
    "page_gap": _SECONDS,
}
"""Upper bounds of each of the engine's spreads, included; what is above them all is counted too. Pages are measured in seconds."""

Told = tuple[tuple[int, ...], float]
"""Values at most as large as each bound and larger than the one before it, then those above all; and the sum of all values."""


class Histogram:
    """One spread."""

    __slots__ = ("_array", "_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds, self._array = tuple(bounds), np.asarray(bounds, np.float64)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def extend(self, values: NDArray[Any]) -> None:
        """Each of them once."""
        for place in np.searchsorted(self._array, values).tolist():
            self._counts[place] += 1
        self._sum += float(values.sum())

    def told(self) -> Told:
        return tuple(self._counts), self._sum


class Histograms:
    """All that one engine keeps."""

    def __init__(self) -> None:
        self.of = {name: Histogram(bounds) for name, bounds in BOUNDS.items()}

    def told(self) -> dict[str, Told]:
        return {name: histogram.told() for name, histogram in self.of.items()}
