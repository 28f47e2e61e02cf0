"""The scheduler's part of encoders: what a step may read, whose pages they fill, and when those are free."""

from __future__ import annotations

import numpy as np
import pytest
from pagoda.hal.errors import CapacityError
from pagoda.hal.kv import CacheGroup, CacheKind, LayerCache
from pagoda.models.encoding import EncoderFacts
from pagoda.serving.engine.messages import EncoderPrompt, EngineRequest
from pagoda.serving.engine.params import SamplingParams
from pagoda.serving.engine.plan import RunnerFacts, StepPlan, StepResult
from pagoda.serving.engine.scheduler import Scheduler, SchedulerConfig

PAGE, VOCAB, LONGEST = 4, 50, 24


def made(pages: int = 60, **config: object) -> Scheduler:
    own = CacheGroup(CacheKind.FULL, (0,), (LayerCache(CacheKind.FULL, 1, 8, 8, "float32"),), PAGE, 256)
    cross = CacheGroup(CacheKind.CROSS, (1,), (LayerCache(CacheKind.CROSS, 1, 8, 8, "float32", longest=LONGEST),), PAGE, 256)
    encoder = EncoderFacts("text", LONGEST, vocab=VOCAB)
    facts = RunnerFacts((own, cross), pages, max_model_len=32, vocab_size=VOCAB, device="toy", overlap=1, encoder=encoder)
    return Scheduler(SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=LONGEST, **config), facts)  # type: ignore[arg-type]


def request(name: str, first: int, count: int, tokens: int = 6, n: int = 1) -> EngineRequest:
    ids = tuple((first + i) % VOCAB for i in range(count))
    params = SamplingParams(temperature=0.5, n=n, max_tokens=tokens, ignore_eos=True)
    return EngineRequest(name, (1,), params, encoder=EncoderPrompt(ids))


def step(scheduler: Scheduler) -> StepPlan | None:
    plan = scheduler.plan()
    if plan is not None:
        rows = int(plan.sampled.sum())
        scheduler.commit(plan, StepResult(plan.step, np.full((rows, 1), 7, np.int32), np.ones(rows, np.int32)))
    return plan


def drained(scheduler: Scheduler) -> None:
    while scheduler.has_work:
        assert step(scheduler) is not None
    assert scheduler.stats().pages_used == 0


def test_a_step_reads_no_more_than_its_budget_while_decodes_go_on() -> None:
    scheduler = made()
    for place, name in enumerate("abc"):
        scheduler.submit(request(name, 10 * place, 16))
    plans = [step(scheduler) for _ in range(3)]
    assert [[encode.tokens for encode in plan.encodes] for plan in plans if plan] == [[16], [16], [16]]
    assert [plan.num_rows for plan in plans if plan] == [1, 2, 3]
    last = plans[-1]
    assert last is not None and last.cross_lengths is not None and last.cross_lengths.tolist() == [16, 16, 16]
    assert [table.shape[1] for table in last.block_tables] == [1, 4]
    assert len(set(last.block_tables[1].flatten().tolist())) == 12, "each has pages of its own"
    drained(scheduler)


def test_the_same_input_is_read_once_and_found_after_its_request() -> None:
    scheduler = made()
    scheduler.submit(request("a", 0, 10))
    scheduler.submit(request("b", 0, 10))
    plan = step(scheduler)
    assert plan is not None and len(plan.encodes) == 1
    assert plan.block_tables[1][0].tolist() == plan.block_tables[1][1].tolist() == plan.encodes[0].pages[0].tolist()
    drained(scheduler)
    scheduler.submit(request("c", 0, 10))
    plan = step(scheduler)
    assert plan is not None and not plan.encodes
    drained(scheduler)


def test_without_caching_only_siblings_share() -> None:
    scheduler = made(enable_prefix_caching=False)
    scheduler.submit(request("a", 0, 10, n=3))
    scheduler.submit(request("b", 0, 10))
    encodes = sum(len(plan.encodes) for _ in range(4) if (plan := step(scheduler)) is not None)
    assert encodes == 2
    drained(scheduler)


def test_an_abort_frees_what_the_encoder_gave() -> None:
    scheduler = made(enable_prefix_caching=False)
    scheduler.submit(request("a", 0, 20))
    step(scheduler)
    assert scheduler.stats().pages_used == 1 + 5
    scheduler.abort(["a"])
    assert scheduler.stats().pages_used == 0


def test_an_input_that_the_pool_cannot_hold_is_refused() -> None:
    scheduler = made(pages=6)
    with pytest.raises(CapacityError, match="need 8 KV pages and the pool has 5"):
        scheduler.submit(request("a", 0, 24))
    scheduler.submit(request("b", 0, 8))
    drained(scheduler)
