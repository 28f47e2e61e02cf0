"""A warm engine compiles nothing, whatever it is asked: random load, held against torch-xla's own count of compilations."""

import asyncio
from typing import Any

import pytest
from pagoda.backends.tpu.runtime import Runtime
from pagoda.hal.discovery import choose
from pagoda.serving.conformance.engines import Oracle, ask, running, tokens_of
from pagoda.serving.conformance.level5_engine import PLAIN, mixed_load

PAGES = 14
"""Room for a request and a half of the longest: requests compete, are preempted and copied."""


@pytest.mark.heavy
@pytest.mark.timeout(1800)
def test_load_compiles_nothing() -> None:
    backend = choose("tpu").backend
    device = backend.open()
    runtime = device.extension(Runtime)
    assert runtime is not None
    asked = mixed_load(5, 40)

    async def under_load() -> tuple[int, int, list[list[int]]]:
        settings: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "num_gpu_blocks_override": PAGES}
        async with running(backend.name, PLAIN, **settings) as run:
            warm = runtime.compilations()
            answers = await asyncio.gather(*(ask(run, one) for one in asked))
            return warm, runtime.compilations(), [tokens_of(deltas) for deltas in answers]

    warm, after, answers = asyncio.run(under_load())
    print(f"{warm} programs were compiled at start, {after - warm} under load")
    assert warm > 0
    assert after == warm
    assert not runtime.host_trips()
    oracle = Oracle(PLAIN)
    for one, tokens in zip(asked, answers, strict=True):
        if one.params.greedy:
            oracle.judge(one, tokens)
