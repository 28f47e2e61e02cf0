"""A tiny engine on the device under test, and requests to it whose right answers the reference device knows."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pagoda.hal.errors import CapacityError, KernelError, ModelError, RequestError
from pagoda.models.direct import DirectRun
from pagoda.serving.conformance.check import Target, UnclaimedError, expect
from pagoda.serving.conformance.comparison import Tolerance, compare_greedy
from pagoda.serving.conformance.level4_models import load, reference_target
from pagoda.serving.engine.build import start_engine
from pagoda.serving.engine.config import EngineConfig
from pagoda.serving.engine.core import Sink
from pagoda.serving.engine.inprocess_client import Engine, InProcessClient
from pagoda.serving.engine.messages import EngineRequest, FinishReason, RequestDelta
from pagoda.serving.engine.params import SamplingParams

MAX_LEN = 128
POOL = {"kv_cache_memory_bytes": 4 << 20}
"""Of an engine that is given no number of pages: room for all of its requests, and little to copy on a device that copies pools."""

T = TypeVar("T")


@dataclass(frozen=True)
class Running:
    """A started engine and its client."""

    client: InProcessClient
    engine: Engine


@asynccontextmanager
async def running(device: str, config: Mapping[str, Any], **settings: Any) -> AsyncIterator[Running]:
    """An engine on a device, by its backend's name, with dummy weights for `config`; small, so that requests compete for it."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(dict(config)))
        pool = {} if "num_gpu_blocks_override" in settings else POOL
        chosen: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": MAX_LEN, **pool, **settings}
        told = EngineConfig(model=folder, device=device, dtype="float32", load_format="dummy", **chosen)
        engines: list[Engine] = []

        def starter(sink: Sink) -> Engine:
            engines.append(start_engine(told, sink))
            return engines[0]

        client = await InProcessClient.start(starter)
        try:
            yield Running(client, engines[0])
        finally:
            await client.close()


def with_engine(
    target: Target, config: Mapping[str, Any], work: Callable[[Running], Coroutine[Any, Any, T]], timeout_s: float = 300, **settings: Any
) -> T:
    """Run `work` on an engine, from start to close."""
    expect_float32(target)
    return on_engine(target.backend.name, config, work, timeout_s, **settings)


def expect_float32(target: Target) -> None:
    """Raise `UnclaimedError` where engines have nothing to be compared in."""
    if "float32" not in target.device.info.dtypes:
        raise UnclaimedError("the device does not compute in float32, in which engines are compared")


def on_engine(
    device: str, config: Mapping[str, Any], work: Callable[[Running], Coroutine[Any, Any, T]], timeout_s: float = 300, **settings: Any
) -> T:
    """The same in a process that has opened no device."""

    async def whole() -> T:
        async with running(device, config, **settings) as run:
            return await asyncio.wait_for(work(run), timeout_s)

    try:
        return asyncio.run(whole())
    except (KernelError, ModelError) as error:
        if settings.get("batch_invariant"):
            first, *others = str(error).split("; --batch-invariant: ")
            more = f"; {len(others)} uses more likewise" if others else ""
            raise UnclaimedError(f"no batch-invariant kernels for this model: {first}{more}") from error
        raise


def request(name: str, prompt: tuple[int, ...], tokens: int, **settings: Any) -> EngineRequest:
    """Greedy unless `settings` say otherwise; never ends early."""
    return EngineRequest(name, prompt, SamplingParams(max_tokens=tokens, ignore_eos=True, **{"temperature": 0.0, **settings}))


async def ask(run: Running, asked: EngineRequest) -> list[RequestDelta]:
    """All deltas of a request; the last one is finished, and no other."""
    deltas = [delta async for delta in run.client.generate(asked)]
    ends = [delta.finished for delta in deltas]
    expect(ends[-1:] == [True] and not any(ends[:-1]), f"{asked.request_id} must end once, with its last delta; found {ends}")
    return deltas


def tokens_of(deltas: list[RequestDelta], index: int = 0) -> list[int]:
    """The tokens of one sequence; a sequence that ended in an error fails the check."""
    parts = [part for delta in deltas for part in delta.sequences if part.index == index]
    wrong = [delta.error for delta in deltas if any(part.finish_reason is FinishReason.ERROR for part in delta.sequences)]
    expect(not wrong, f"a sequence ended in an error: {wrong}")
    return [token for part in parts for token in part.token_ids]


class Oracle:
    """Greedy answers of the reference device in float64, and whether an engine's answer is as good."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._target = reference_target()
        self._model = load(self._target, config, "float64")

    def judge(self, asked: EngineRequest, tokens: list[int]) -> bool:
        """Raise unless the tokens are the oracle's up to a tie; returns whether they are to the end."""
        count = asked.params.max_tokens or 0
        ((wanted, logits),) = DirectRun(self._model, self._target.device, 1, len(asked.prompt) + count).generate([asked.prompt], count)
        expect(len(tokens) == count, f"{asked.request_id}: {len(tokens)} tokens instead of {count}")
        finding, _ = compare_greedy(asked.request_id, tokens, logits, wanted, logits, Tolerance())
        expect(finding.passed, f"{finding.name}: {finding.note}")
        return not finding.note


async def drained(run: Running) -> str:
    """Nothing runs, waits or holds a page; returns a sentence about the load that was."""
    for _ in range(200):
        stats = await run.client.stats()
        if stats.running == stats.waiting == stats.pages_used == 0:
            break
        await asyncio.sleep(0.02)
    expect(stats.running == stats.waiting == 0, f"{stats.running} requests run and {stats.waiting} wait after all have ended")
    expect(stats.pages_used == 0, f"{stats.pages_used} of {stats.pages_total} pages are still in use after all requests have ended")
    expect(stats.pages_cached <= stats.pages_total, f"{stats.pages_cached} pages are cached of {stats.pages_total}")
    return f"{stats.steps} steps, {stats.preemptions} preemptions, {stats.prefix_hits} prompt tokens from the prefix cache"


async def refused(run: Running, asked: EngineRequest) -> str:
    """The message of the error that refuses a request."""
    try:
        await ask(run, asked)
    except (RequestError, CapacityError) as error:
        return str(error)
    expect(False, f"{asked.request_id} was accepted")
    return ""
