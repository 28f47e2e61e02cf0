"""What is measured of every engine: one row a workload, its load and how its value is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from pagoda.hal.errors import ConfigError

PREFIX = 1024


class Load(NamedTuple):
    """Random prompts of `prompt` tokens of which the first `shared` are all the same, `together` of them in flight at a time."""

    prompt: int
    answer: int
    requests: int
    together: int = 1
    shared: int = 0


class Seen(NamedTuple):
    """Of one load: medians of time per token and to the first token (ms), and output tokens a second."""

    per_token_ms: float
    first_token_ms: float
    output_rate: float


@dataclass(frozen=True)
class Row:
    """One workload. `load` is None for what a turn measures anyhow; `less` where smaller is better."""

    name: str
    title: str
    less: bool
    load: Load | None = None
    value: Callable[[Seen], float] = lambda seen: seen.output_rate


ROWS = (
    Row("batch1", "batch 1, ms a token", True, Load(128, 128, 3), lambda seen: seen.per_token_ms),
    Row("prefill", f"prefill of {PREFIX:,}, tok/s", False, Load(PREFIX, 1, 3), lambda seen: PREFIX * 1000 / seen.first_token_ms),
    Row("requests16", "16 requests, output tok/s", False, Load(128, 128, 16, 16)),
    Row("requests32", "32 requests, output tok/s", False, Load(128, 128, 32, 32)),
    Row(
        "prefix", f"{PREFIX:,}-token prefix cached, ms to first token", True, Load(PREFIX + 16, 8, 7, 1, PREFIX),
        lambda seen: seen.first_token_ms,
    ),
    Row("start", "start to first token, s", True),
    Row("memory", "peak memory, MiB", True),
)  # fmt: skip
BY_NAME = {row.name: row for row in ROWS}


def chosen(names: tuple[str, ...]) -> tuple[Row, ...]:
    """The rows of these names, or all; what needs no load always comes along."""
    unknown = [name for name in names if name not in BY_NAME]
    if unknown:
        raise ConfigError(f"no row {unknown[0]!r}; there are {', '.join(BY_NAME)}")
    return tuple(row for row in ROWS if not names or row.name in names or row.load is None)
