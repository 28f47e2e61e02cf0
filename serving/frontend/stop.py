"""Stop strings over streamed text: finds the first to be completed and holds back only what may still become one."""

from __future__ import annotations

from typing import NamedTuple


class StopScan(NamedTuple):
    """Text that is safe to send, and the stop string that ended the sequence (or None)."""

    text: str
    stopped_by: str | None


class StopStrings:
    """One sequence's scanner. How the text is cut into pushes does not change what comes out."""

    def __init__(self, stops: tuple[str, ...], *, include: bool = False) -> None:
        self._stops = stops
        self._include = include
        self._held = ""

    def push(self, text: str) -> StopScan:
        """Scan more text. After a match nothing more may be pushed."""
        self._held += text
        if match := self._first_match():
            start, stop = match
            end = start + len(stop) if self._include else start
            out, self._held = self._held[:end], ""
            return StopScan(out, stop)
        keep = self._partial_match_length()
        cut = len(self._held) - keep
        out, self._held = self._held[:cut], self._held[cut:]
        return StopScan(out, None)

    def release(self, text: str = "") -> str:
        """Held text plus `text`, unscanned: at the end of a sequence, and before `min_tokens`."""
        out, self._held = self._held + text, ""
        return out

    def _first_match(self) -> tuple[int, str] | None:
        # the earliest end decides, as it would had the text come character by character; then the longest
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := self._held.find(stop)) >= 0]
        if not found:
            return None
        _, start, stop = min(found)
        return start, stop

    def _partial_match_length(self) -> int:
        longest = min(len(self._held), max(map(len, self._stops), default=1) - 1)
        for length in range(longest, 0, -1):
            tail = self._held[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
