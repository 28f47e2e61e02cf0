"""The engine in its own process and ranks in theirs: tokens, aborts, control calls; whoever is killed, nobody hangs and nobody is left."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
import types
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pagoda.hal.comm import Topology
from pagoda.hal.errors import CapacityError, ConfigError, EngineDeadError, RequestError
from pagoda.serving.engine.core import Sink
from pagoda.serving.engine.executors.multiproc import MultiprocExecutor
from pagoda.serving.engine.inprocess_client import Engine
from pagoda.serving.engine.messages import EngineRequest, FinishReason
from pagoda.serving.engine.runner import Runner
from pagoda.serving.engine.wire_client import WireClient
from pagoda.serving.engine.zmq_client import ZmqClient
from patience import until
from slow_steps import FileBrake, slow_engine
from toy import ToyModel, dense_greedy, toy_engine, toy_request, toy_runner

PROMPT = [5, 17, 80, 3, 44, 9]


async def ask(client: ZmqClient, request: EngineRequest) -> list[int]:
    return [token async for delta in client.generate(request) for sequence in delta.sequences for token in sequence.token_ids]


@pytest.fixture
def brake(tmp_path: Path) -> FileBrake:
    """The client's engine is slow while it is on."""
    return FileBrake(tmp_path / "brake")


@pytest.fixture
async def client(brake: FileBrake) -> AsyncIterator[ZmqClient]:
    made = await ZmqClient.start(partial(slow_engine, toy_engine, brake))
    yield made
    await made.close()


def gone(*pids: int) -> None:
    """Waits for their end; a zombie that waits for its parent counts as gone."""
    until(lambda: not any(map(lives, pids)), f"for the end of {pids}")


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def children(pid: int) -> list[int]:
    return [int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()]


async def test_tokens_stats_and_orderly_end(client: ZmqClient) -> None:
    prompts = [PROMPT, [9, 8, 7], [50] * 40]
    answers = await asyncio.gather(*(ask(client, toy_request(str(i), prompt, 20)) for i, prompt in enumerate(prompts)))
    assert list(answers) == [dense_greedy(ToyModel(), prompt, 20) for prompt in prompts]
    stats = await client.stats()
    assert stats.generation_tokens == 60 and stats.finished["length"] == 3
    assert client.facts.vocab_size == 97 and client.facts.tokens_per_page == 4
    pid = client.pid
    await client.close()
    gone(pid)
    assert client._child.process.returncode == 0
    await client.close()


async def test_another_client_joins_and_what_it_left_behind_ends(client: ZmqClient, brake: FileBrake) -> None:
    client.admit("-1")
    other = WireClient(client.folder, "-1")
    other.connect(client.facts)
    prompts = [PROMPT, [9, 8, 7], [50] * 40, [3, 4]]
    answers = await asyncio.gather(
        *((ask(one, toy_request(f"{one is other}{i}", prompt, 20))) for i, prompt in enumerate(prompts) for one in (client, other))
    )
    assert answers == [dense_greedy(ToyModel(), prompt, 20) for prompt in prompts for _ in range(2)]
    with pytest.raises(RequestError, match="no control call"):
        await other.call("unknown")
    brake.put_on()
    lost = [asyncio.ensure_future(ask(other, toy_request(f"lost{i}", PROMPT, 100_000, ignore_eos=True))) for i in range(2)]
    kept = asyncio.ensure_future(ask(client, toy_request("kept", PROMPT, 40)))
    while (await client.stats()).running < 2:
        await asyncio.sleep(0.01)
    client.dismiss("-1")
    brake.release()
    assert await kept == dense_greedy(ToyModel(), PROMPT, 40)
    while (await client.stats()).running:
        await asyncio.sleep(0.01)
    assert (await client.stats()).finished["abort"] == 2
    for task in lost:
        task.cancel()
    await asyncio.gather(*lost, return_exceptions=True)
    await other.close()


async def test_everything_crosses_and_comes_back(client: ZmqClient) -> None:
    request = toy_request("a", PROMPT, 3, logprobs=2, prompt_logprobs=1, logit_bias={4: 1.5}, extra={"x": [1, {"y": None}]})
    deltas = [delta async for delta in client.generate(request)]
    assert deltas[0].prompt_logprobs is not None and len(deltas[0].prompt_logprobs) == len(PROMPT) - 1
    rows = [row for delta in deltas for sequence in delta.sequences for row in sequence.logprobs or ()]
    assert [len(row.top_ids) for row in rows] == [2, 2, 2] and all(row.logprob <= 0 and row.rank >= 1 for row in rows)
    assert deltas[-1].sequences[0].finish_reason is FinishReason.LENGTH


async def test_errors_keep_their_class_and_field(client: ZmqClient) -> None:
    with pytest.raises(RequestError, match="500") as caught:
        await ask(client, toy_request("a", [3], logit_bias={500: 1.0}))
    assert caught.value.param == "logit_bias"
    with pytest.raises(RequestError, match="no control call"):
        await client.call("dance")
    with pytest.raises((RequestError, CapacityError), match="300"):
        await ask(client, toy_request("b", [3] * 300))
    assert await client.call("sleep", level=1) is None and await client.call("is_sleeping") is True
    await client.call("wake")
    assert await ask(client, toy_request("c", PROMPT)) == dense_greedy(ToyModel(), PROMPT, 8)


async def test_a_request_that_cannot_be_read_is_refused_and_the_engine_hears_the_next(client: ZmqClient) -> None:
    with pytest.raises(RequestError, match="cannot read this request"):
        await ask(client, toy_request("odd", PROMPT, 3, extra=5))
    client._requests.send(b"\x00 no message at all")
    for value in (10**30, "\ud800"):
        with pytest.raises(RequestError, match="cannot be handed to the engine"):
            await ask(client, toy_request("large", PROMPT, 3, extra={"x": value}))
    assert await ask(client, toy_request("next", PROMPT)) == dense_greedy(ToyModel(), PROMPT, 8)


async def test_aborts_free_the_pages(client: ZmqClient, brake: FileBrake) -> None:
    brake.put_on()
    left = client.generate(toy_request("left", PROMPT, 200))
    await anext(left)
    await left.aclose()  # type: ignore[attr-defined]
    told = client.generate(toy_request("told", PROMPT, 200))
    await anext(told)
    await client.abort(["told"])
    assert [delta async for delta in told][-1].sequences[0].finish_reason is FinishReason.ABORT
    while (await client.stats()).pages_used:
        await asyncio.sleep(0.01)


async def test_a_killed_engine_is_told_to_every_request(client: ZmqClient, brake: FileBrake) -> None:
    brake.put_on()
    streams = [client.generate(toy_request(str(i), PROMPT, 240)) for i in range(3)]
    for stream in streams:
        await anext(stream)
    call = asyncio.create_task(client.call("stats"))
    os.kill(client.pid, signal.SIGKILL)
    for stream in streams:
        with pytest.raises(EngineDeadError, match="killed by signal 9"):
            while True:
                await anext(stream)
    await asyncio.wait([call])
    with pytest.raises(EngineDeadError, match="killed by signal 9"):
        await client.health()
    with pytest.raises(EngineDeadError):
        await ask(client, toy_request("late", PROMPT))


async def test_a_failing_loop_says_why_and_exits_non_zero() -> None:
    client = await ZmqClient.start(_failing_engine)
    with pytest.raises(EngineDeadError, match="the lights went out"):
        await ask(client, toy_request("a", PROMPT, 100))
    gone(client.pid)
    assert client._child.process.wait() == 1
    with pytest.raises(EngineDeadError, match="the lights went out"):
        await client.health()
    await client.close()


async def test_a_load_error_is_raised_here_as_it_was_there() -> None:
    with pytest.raises(ConfigError, match="no such thing as 7"):
        await ZmqClient.start(_misconfigured)
    with pytest.raises(EngineDeadError, match=r"ZeroDivisionError.*\n(.*\n)*.*_broken"):
        await ZmqClient.start(_broken)


async def test_an_engine_that_dies_while_loading_is_noticed() -> None:
    with pytest.raises(EngineDeadError, match="exited with code 3"):
        await ZmqClient.start(_exiting)


async def test_a_starter_that_the_engines_process_cannot_import_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    here_only = types.ModuleType("here_only")
    exec("def start(sink): ...", here_only.__dict__)
    monkeypatch.setitem(sys.modules, "here_only", here_only)
    with pytest.raises(EngineDeadError, match="exited with code 1"):
        await ZmqClient.start(here_only.start)


@pytest.mark.heavy
async def test_ranks_in_processes_and_a_killed_one(brake: FileBrake) -> None:
    client = await ZmqClient.start(partial(slow_engine, partial(toy_engine, world=2), brake))
    assert await ask(client, toy_request("a", PROMPT, 20)) == dense_greedy(ToyModel(), PROMPT, 20)
    memory = await client.call("memory")
    assert len(memory) == 2 and memory[0] == memory[1]
    ranks = children(client.pid)
    assert len(ranks) == 2
    brake.put_on()
    stream = client.generate(toy_request("long", PROMPT, 240))
    await anext(stream)
    os.kill(ranks[1], signal.SIGKILL)
    with pytest.raises(EngineDeadError, match=r"rank 1 of 2 .*killed by signal 9"):
        while True:
            await anext(stream)
    gone(client.pid, *ranks)
    await client.close()


@pytest.mark.heavy
async def test_a_rank_killed_while_idle_ends_the_engine() -> None:
    client = await ZmqClient.start(partial(toy_engine, world=1))
    (rank,) = children(client.pid)
    os.kill(rank, signal.SIGKILL)
    gone(client.pid)
    with pytest.raises(EngineDeadError, match="rank 0 of 1"):
        while True:  # until it has heard of it
            await client.health()
            await asyncio.sleep(0.01)
    await client.close()


@pytest.mark.heavy
def test_a_failing_rank_is_raised_at_start_and_leaves_no_orphan() -> None:
    executor = MultiprocExecutor(_rank_one_fails, 2)
    with pytest.raises(CapacityError, match="rank 1 has no room") as caught:
        executor.start()
    assert (caught.value.asked, caught.value.available) == (9, 4)
    gone(*executor.pids)


@pytest.mark.heavy
def test_nobody_survives_a_killed_parent() -> None:
    script = f"""
import asyncio, os, sys
sys.path[:0] = {[str(Path(__file__).parent.parent / "samples")]!r}
from functools import partial
from toy import toy_engine
from pagoda.serving.engine.zmq_client import ZmqClient
async def main():
    client = await ZmqClient.start(partial(toy_engine, world=2))
    print(client.pid, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    try:
        engine = int(parent.stdout.readline())
        family = [engine, *children(engine)]
        assert len(family) == 3
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
    gone(*family)


# What children run; found there by name.


def _failing_engine(sink: Sink) -> Engine:
    engine = toy_engine(sink)
    submit = engine.executor.submit

    def failing(plan: Any) -> Any:
        if plan.step == 5:
            raise ValueError("the lights went out")
        return submit(plan)

    engine.executor.submit = failing  # type: ignore[method-assign]
    return engine


def _misconfigured(sink: Sink) -> Engine:
    raise ConfigError("no such thing as 7")


def _broken(sink: Sink) -> Engine:
    raise ZeroDivisionError("nothing")


def _exiting(sink: Sink) -> Engine:
    os._exit(3)


def _rank_one_fails(topology: Topology) -> Runner:
    if topology.rank == 1:
        raise CapacityError("rank 1 has no room", asked=9, available=4)
    time.sleep(0.1)
    return toy_runner(topology)
