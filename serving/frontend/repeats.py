"""Finds an answer that says one thing over and over."""

from __future__ import annotations

from collections import deque

from pagoda.serving.engine.params import RepetitionDetection


class Repeats:
    """One sequence's newest tokens. Of each length of a pattern it counts the tokens up to now that equal the one so far before them."""

    __slots__ = ("_asked", "_last", "_runs")

    def __init__(self, asked: RepetitionDetection) -> None:
        self._asked = asked
        self._last: deque[int] = deque(maxlen=asked.max_pattern_size)
        self._runs = [0] * (asked.max_pattern_size + 1)

    def push(self, token: int) -> bool:
        """Whether the newest tokens are now `min_count` times the same pattern of an allowed length."""
        asked, last, runs, found = self._asked, self._last, self._runs, False
        for length in range(asked.min_pattern_size, len(last) + 1):
            runs[length] = runs[length] + 1 if last[-length] == token else 0
            found = found or runs[length] >= length * (asked.min_count - 1)
        last.append(token)
        return found
