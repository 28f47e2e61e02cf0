"""What large prompts leave with the allocator goes back to the system when decodes follow, where memory is the host's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from pagoda.hal.info import Feature
from pagoda.serving.engine.leftovers import LARGE, QUIET, Leftovers


@dataclass
class Counted:
    """A device of which only what `Leftovers` asks for is there."""

    features: frozenset[Feature]
    trims: int = 0
    info: Any = field(init=False)
    memory: Any = field(init=False)

    def __post_init__(self) -> None:
        self.info = self.memory = self

    def trim(self) -> None:
        self.trims += 1


def _after(steps: list[int], features: frozenset[Feature] = frozenset({Feature.UNIFIED_MEMORY})) -> int:
    device: Any = Counted(features)
    leftovers = Leftovers(device)
    for tokens in steps:
        leftovers.after(tokens)
    return int(device.trims)


@pytest.mark.parametrize(
    ("steps", "trims"),
    [
        ([1] * 100, 0),
        ([LARGE] * 100, 0),
        ([LARGE] + [1] * (QUIET - 1), 0),
        ([LARGE] + [1] * QUIET, 1),
        ([LARGE] + [LARGE - 1] * 100, 1),
        (([LARGE] + [1] * (QUIET - 1)) * 5, 0),
        (([LARGE] + [1] * QUIET) * 5, 5),
    ],
)
def test_once_for_each_run_of_decodes_behind_a_large_step(steps: list[int], trims: int) -> None:
    assert _after(steps) == trims


def test_never_where_the_device_has_memory_of_its_own() -> None:
    assert _after([LARGE] + [1] * 100, frozenset()) == 0
