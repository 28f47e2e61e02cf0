"""Level 5, the engine: its invariants under random load, determinism, a killed rank, sleep and wake."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from pagoda.hal.device import Spreads
from pagoda.hal.errors import EngineDeadError, RequestError
from pagoda.serving.conformance.check import Check, FailedError, Target, UnclaimedError, apart, expect
from pagoda.serving.conformance.engines import (
    MAX_LEN,
    Oracle,
    Running,
    ask,
    drained,
    expect_float32,
    on_engine,
    refused,
    request,
    tokens_of,
    with_engine,
)
from pagoda.serving.conformance.ranks import device_indices, in_own_process
from pagoda.serving.conformance.tiny_models import TINY
from pagoda.serving.engine.executors.multiproc import MultiprocExecutor
from pagoda.serving.engine.messages import EngineRequest

LOADED = ("grouped queries, rotation, gated feed-forward", "windows with a rotation of their own", "mixture of experts")
"""Kinds of model whose engines are put under load: one cache group, two, experts."""

PLAIN = TINY[LOADED[0]]
PROMPT = tuple(range(70, 105))


def checks(target: Target) -> Iterator[Check]:
    """All of level 5."""
    for kind in LOADED:
        yield apart(5, f"random load: {kind}", partial(_random_load, config=TINY[kind]))
    yield apart(5, "random load in steps of at most eight tokens", partial(_random_load, config=PLAIN, max_num_batched_tokens=8))
    yield apart(5, "a prefix hit changes nothing", _prefix_hit)
    yield apart(5, "a seed gives the same tokens alone, again and in a crowd", _seeds)
    yield apart(5, "batch invariance: logprobs alone and in a crowd are equal to the bit", _invariance)
    yield apart(5, "what can never fit is refused with the number", _refusals)
    yield apart(5, "an abandoned request frees its pages", _abandoned)
    yield apart(5, "sleep and wake, both levels", _sleep)
    yield Check(5, "two ranks answer as one", _two_ranks)
    yield Check(5, "a killed rank fails its requests, soon", _killed_rank)


_SPICE: tuple[dict[str, Any], ...] = (
    {}, {"temperature": 0.9, "seed": 1, "n": 2}, {}, {"logprobs": 2}, {}, {"temperature": 1.0, "seed": 2, "logprobs": 1}, {},
    {"temperature": 0.7, "seed": 3, "top_k": 20, "presence_penalty": 0.5}, {}, {"logit_bias": {70: -3.0}, "temperature": 1.0, "seed": 4},
)  # fmt: skip
"""What requests ask besides greedy tokens, in turn: steps then mix everything that samplers do."""


def mixed_load(seed: int, count: int) -> list[EngineRequest]:
    """Requests of every length, with common beginnings; some sample, some want several sequences, logprobs, penalties or a bias."""
    draw = random.Random(seed)
    beginnings = [tuple(draw.randrange(64, 256) for _ in range(length)) for length in (16, 40, 64)]
    asked = []
    for number in range(count):
        prompt = (*draw.choice([(), *beginnings]), *(draw.randrange(64, 256) for _ in range(draw.randint(1, 30))))
        settings = dict(_SPICE[number % len(_SPICE)])
        asked.append(request(f"load-{number}", prompt, draw.randint(1, 30), **settings))
    return asked


def _random_load(target: Target, config: Mapping[str, Any], **settings: Any) -> str:
    asked, settings = mixed_load(5, 48), {"num_gpu_blocks_override": _few_pages(target, config), **settings}
    answers, sentence = with_engine(target, config, partial(_under_load, asked=asked), **settings)
    oracle = Oracle(config)
    greedy = [(one, tokens) for one, tokens in zip(asked, answers, strict=True) if one.params.greedy and tokens is not None]
    whole = sum(oracle.judge(one, tokens) for one, tokens in greedy)
    return f"{sentence}; {whole} of {len(greedy)} greedy answers are the oracle's to the end, the others to a tie"


def _few_pages(target: Target, config: Mapping[str, Any]) -> int:
    """Room for a request and a half of the longest, so that eight compete for it."""
    groups = 2 if config["model_type"] == "gemma3_text" else 1
    return 2 + 3 * groups * -(-MAX_LEN // min(target.device.info.limits.page_sizes)) // 2


async def _under_load(run: Running, asked: list[EngineRequest]) -> tuple[list[list[int] | None], str]:
    """Tokens of each request, None for those that were left early; they arrive in bursts and every seventh leaves."""
    draw = random.Random(6)

    async def live(number: int, one: EngineRequest) -> list[int] | None:
        await asyncio.sleep(draw.random() * 0.3)
        if number % 7 != 3:
            deltas = await ask(run, one)
            for index in range(one.params.n):
                expect(len(tokens_of(deltas, index)) == one.params.max_tokens, f"{one.request_id} has the wrong number of tokens")
            return tokens_of(deltas)
        async for _ in run.client.generate(one):
            return None
        return None

    answers = await asyncio.gather(*(live(number, one) for number, one in enumerate(asked)))
    return list(answers), await drained(run)


def _prefix_hit(target: Target) -> str:
    async def work(run: Running) -> tuple[list[int], list[int], int]:
        first = await ask(run, request("first", PROMPT * 3, 8))
        second = await ask(run, request("second", PROMPT * 3, 8))
        return tokens_of(first), tokens_of(second), second[0].cached_tokens

    first, second, cached = with_engine(target, PLAIN, work)
    expect(cached > 0, "the same prompt found nothing in the prefix cache")
    expect(first == second, f"a prefix hit changed the answer: {first} became {second}")
    Oracle(PLAIN).judge(request("second", PROMPT * 3, 8), second)
    return f"{cached} of {3 * len(PROMPT)} prompt tokens were cached"


def _seeds(target: Target) -> str:
    warm = partial(request, prompt=PROMPT, tokens=16, temperature=1.1, top_p=0.95, seed=1234)

    async def work(run: Running) -> list[list[int]]:
        alone = await ask(run, warm("alone"))
        crowd = [request(f"crowd-{number}", PROMPT[number:], 12, temperature=1.0, seed=number) for number in range(6)]
        answers = await asyncio.gather(*(ask(run, one) for one in (*crowd[:3], warm("crowded"), *crowd[3:])))
        return [tokens_of(alone), tokens_of(answers[3])]

    found = [tokens for _ in range(2) for tokens in with_engine(target, PLAIN, work)]
    expect(all(tokens == found[0] for tokens in found), f"one seed gave different tokens: {found}")
    expect(len(set(found[0])) > 4, f"sampling at temperature 1.1 gave {found[0]}")
    return f"{len(found)} times the same {len(found[0])} tokens"


def _invariance(target: Target) -> str:
    def wanted(name: str) -> EngineRequest:
        return request(name, PROMPT, 12, logprobs=3)

    async def work(run: Running) -> list[list[float]]:
        alone = await ask(run, wanted("alone"))
        crowd = [request(f"crowd-{number}", PROMPT[: 3 + 5 * number], 12) for number in range(6)]
        answers = await asyncio.gather(*(ask(run, one) for one in (*crowd[:3], wanted("crowded"), *crowd[3:])))
        return [_logprobs(deltas) for deltas in (alone, answers[3])]

    alone, crowded = with_engine(target, PLAIN, work, batch_invariant=True, enable_prefix_caching=False)
    expect(alone == crowded, f"logprobs differ by up to {max(abs(a - b) for a, b in zip(alone, crowded, strict=True)):.3g}")
    return f"{len(alone)} logprobs"


def _logprobs(deltas: list[Any]) -> list[float]:
    entries = [entry for delta in deltas for part in delta.sequences for entry in part.logprobs or ()]
    return [number for entry in entries for number in (entry.logprob, *entry.top_logprobs)]


def _refusals(target: Target) -> str:
    async def work(run: Running) -> str:
        for name, asked, number in (
            ("a prompt that is too long", request("long", PROMPT * 5, 4), str(5 * len(PROMPT))),
            ("an unknown token id", request("unknown", (70, 256), 4), "256"),
        ):
            message = await refused(run, asked)
            expect(number in message, f"{name} was refused without the number {number}: {message}")
        tokens_of(await ask(run, request("fits", PROMPT, 4)))
        return await drained(run)

    return with_engine(target, PLAIN, work)


def _abandoned(target: Target) -> str:
    async def work(run: Running) -> str:
        stream = run.client.generate(request("left", PROMPT, 80))
        await anext(stream)
        used = (await run.client.stats()).pages_used
        await stream.aclose()  # type: ignore[attr-defined]
        expect(used > 0, "a running request holds no page")
        return await drained(run)

    return with_engine(target, PLAIN, work)


def _sleep(target: Target) -> str:
    async def work(run: Running) -> list[list[int]]:
        answers = [tokens_of(await ask(run, request("before", PROMPT, 8)))]
        for level in (1, 2):
            await run.client.call("sleep", level=level)
            expect(bool(await run.client.call("is_sleeping")), "an engine that was put to sleep says it is awake")
            await refused(run, request(f"asleep-{level}", PROMPT, 8))
            await run.client.call("wake")
            answers.append(tokens_of(await ask(run, request(f"after-{level}", PROMPT, 8))))
        await drained(run)
        return answers

    before, *after = with_engine(target, PLAIN, work)
    expect(after == [before, before], f"sleep changed the answer: {before} became {after}")
    return "the answer stays the same"


def _two_ranks(target: Target) -> str:
    expect_float32(target)
    device_indices(target, 2)
    work = partial(_as_one, target.backend.name)
    # One program over several chips must be the first thing that a process asks of its runtime, and this one has opened a chip.
    return in_own_process(work) if isinstance(target.backend, Spreads) else work()


def _as_one(device: str) -> str:
    asked = [one for one in mixed_load(9, 8) if one.params.greedy]

    async def work(run: Running) -> list[list[int]]:
        return [tokens_of(deltas) for deltas in await asyncio.gather(*(ask(run, one) for one in asked))]

    answers, oracle = on_engine(device, PLAIN, work, tensor_parallel_size=2), Oracle(PLAIN)
    whole = sum(oracle.judge(one, tokens) for one, tokens in zip(asked, answers, strict=True))
    return f"{whole} of {len(asked)} answers are the oracle's to the end, the others to a tie"


def _killed_rank(target: Target) -> str:
    if isinstance(target.backend, Spreads):
        raise UnclaimedError("one process drives all its devices, so there is no rank that could be killed")
    device_indices(target, 2)

    async def work(run: Running) -> float:
        executor = run.engine.executor
        assert isinstance(executor, MultiprocExecutor)
        stream = run.client.generate(request("doomed", PROMPT, 90))
        await anext(stream)
        os.kill(executor.pids[1], signal.SIGKILL)
        killed = time.monotonic()
        try:
            async for _ in stream:
                pass
        except EngineDeadError as error:
            expect("rank" in str(error), f"the error does not name the rank: {error}")
        else:
            raise FailedError("a request outlived a rank")
        try:
            await run.client.health()
        except (EngineDeadError, RequestError):
            return time.monotonic() - killed
        raise FailedError("the engine calls itself healthy after a rank was killed")

    return f"told after {with_engine(target, PLAIN, work, tensor_parallel_size=2):.1f} s"
