"""Processes that compile: each result comes back by its key, and one that takes too long or dies is named while the others go on."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

LIMIT = 20.0
"""Seconds, those of a process's start on a busy machine included."""


def halved(thing: str) -> int:
    """What a process does in these tests: `sleep` takes too long, `die` ends the process."""
    if thing == "sleep":
        time.sleep(600)
    if thing == "die":
        os._exit(7)
    return int(thing) // 2


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> type:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "ci"))
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    import cross_pool

    assert sys.modules[halved.__module__].halved is halved
    return cross_pool.Pool


@pytest.mark.parametrize("jobs", [1, 3])
def test_every_result_comes_back_by_its_key(pool: type, jobs: int) -> None:
    with pool(halved, jobs, 60.0) as processes:
        for first in (0, 100):  # the same processes again
            things = {f"key {i}": str(i) for i in range(first, first + 12)}
            assert dict(processes.results(things)) == {key: int(thing) // 2 for key, thing in things.items()}
        assert len({worker.process.pid for worker in processes._idle}) == jobs
        workers = list(processes._idle)
    assert not any(worker.process.is_alive() for worker in workers)


@pytest.mark.heavy
def test_what_takes_too_long_or_dies_is_named_and_the_rest_goes_on(pool: type) -> None:
    with pool(halved, 1, LIMIT) as processes:
        found = dict(processes.results({"a": "10", "b": "sleep", "c": "20", "d": "die", "e": "30"}))
    assert found == {"a": 5, "b": "takes longer than 20 s", "c": 10, "d": "ends its process, with 7", "e": 15}
