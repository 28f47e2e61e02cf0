"""Captures ahead of need: what comes first and what later, steps that are not captured yet, and when the loop lets ranks capture."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pagoda.backends.cuda.device import POLICY
from pagoda.backends.null.device import NullGraphs
from pagoda.backends.torch_host.graphs import EagerGraphs
from pagoda.hal.comm import Topology
from pagoda.hal.errors import DeviceError, EngineDeadError
from pagoda.hal.graphs import GraphPolicy, Replay
from pagoda.models.model import ModelInputs, ModelOutput
from pagoda.ops.attention import PagedBatch
from pagoda.serving.engine import captured, captures, cascade
from pagoda.serving.engine.batch import Bucket
from pagoda.serving.engine.build import engine_starter
from pagoda.serving.engine.capture_plan import Wanted, ladder, nearly_as_good, wanted_captures
from pagoda.serving.engine.captures import SHARE, STARVED_SECONDS, CaptureRule
from pagoda.serving.engine.inprocess_client import InProcessClient
from pagoda.serving.engine.params import SamplingParams
from pagoda.serving.engine.plan import CaptureReport, Captures, StepPlan, StepResult
from pagoda.serving.engine.runner import Runner
from pagoda.serving.engine.settings import Use
from plans import GREEDY, Hand
from tiny import tiny_config
from toy import SIZES, ToyModel, dense_greedy, toy_engine, toy_request, toy_runner

PROMPT, OTHER = [5, 17, 80, 3, 44, 9, 61, 2, 33, 70, 12, 8, 25], [90, 4, 6, 31]
WARM = SamplingParams(temperature=1.0, seed=11, top_p=0.9, max_tokens=64)
BIASED = SamplingParams(temperature=0, logit_bias={7: 2.0}, max_tokens=64)


def test_few_captures_come_first_and_leave_no_step_without_one_of_its_order() -> None:
    wanted = wanted_captures(POLICY, 256, 8192, lazy=True, adapters=False, beginning=1024)
    everything = wanted_captures(POLICY, 256, 8192, lazy=False, adapters=False, beginning=1024).first
    assert {*wanted.first, *wanted.later} == {*everything} and len(wanted.first) + len(wanted.later) == len(everything) > 70
    decodes = [job.bucket.rows for job in wanted.first if not job.prompts]
    prompts = [job.bucket.tokens for job in wanted.first if job.prompts]
    assert decodes == [256, 64, 16, 4, 1] and prompts == [8192, 4096, 2048, 1024, 512, 256, 128, 64, 32]
    first, *_, last = wanted.later
    assert (first.bucket.rows, first.prompts, last.shared) == (1, False, 1024)
    assert wanted_captures(GraphPolicy("captured", (1,), (1,), at_start=False), 4, 64, True, False, 0) == Wanted()
    with_adapters = wanted_captures(POLICY, 256, 8192, lazy=True, adapters=True, beginning=0)
    assert with_adapters.first == wanted.first and with_adapters.later[-1].adapted and not with_adapters.later[0].adapted


@pytest.mark.parametrize(
    ("sizes", "factor", "kept"), [((256, 240, 64, 48, 8, 4, 2, 1), 4, (256, 64, 48, 8, 2)), ((9,), 2, (9,)), ((), 2, ())]
)
def test_a_ladder_reaches_down(sizes: tuple[int, ...], factor: int, kept: tuple[int, ...]) -> None:
    made = ladder(sizes, factor)
    assert made[:3] == kept[:3]
    for size in sizes:
        assert any(size <= step <= factor * size or step == min(one for one in sizes if one >= size) for step in made)


def lazy(**settings: Any) -> Runner:
    made = toy_runner(Topology(0, 1), "reference", burst=2, **settings)
    made.warm_up()
    return made


def lives(runner: Runner, params: SamplingParams, capture: bool = False) -> list[list[int]]:
    """Three sequences: prompts at once, single steps, a burst where it may be, and steps of fewer rows."""
    hand = Hand(runner)
    rows = [hand.sequence(slot, tokens, params) for slot, tokens in ((0, PROMPT), (1, OTHER), (2, [7]))]
    hand.run(*((row, len(row.tokens)) for row in rows), capture=capture)
    for count in (3, 2, 1, 3):
        hand.run(*((row, 1) for row in rows[:count]), capture=capture)
    if params.plain:
        hand.burst(rows, [2, 2, 1])
    for count in (3, 2):
        hand.run(*((row, 1) for row in rows[:count]), capture=capture)
    return [row.output for row in rows]


@pytest.mark.parametrize("params", [GREEDY, WARM, BIASED])
def test_tokens_are_the_same_before_during_and_after_captures(params: SamplingParams) -> None:
    plain = lives(toy_runner(Topology(0, 1), "reference", burst=2), params)  # nothing is captured
    warmed = lazy()
    before = warmed._captured.counts
    assert 0 < before.captured < before.left
    assert lives(warmed, params) == plain
    assert warmed._captured.counts.captured == before.captured, "nothing is captured but when a plan says so"
    assert lives(warmed, params, capture=True) == plain
    assert warmed._captured.counts.captured > before.captured
    while warmed.capture_next().job is not None:
        assert lives(warmed, params) == plain if warmed._captured.counts.left % 7 == 0 else True
    counts = warmed._captured.counts
    assert counts.left == 0 and lives(warmed, params) == plain and warmed._captured.counts == counts


def test_what_was_missing_is_captured_next() -> None:
    made = lazy()
    lives(made, WARM)
    reports = [made.capture_next() for _ in range(3)]
    assert all(
        report.job is not None and f"sampled with {Use.RANDOM | Use.FILTER}" in report.job and report.error is None for report in reports
    )
    before = made._captured.counts.captured
    lives(made, WARM, capture=True)
    assert made._captured.counts.captured - before <= 1, "steps of a burst and of three sizes were captured by now"


def test_a_step_tells_what_was_captured() -> None:
    made = lazy()
    hand = Hand(made)
    sequence = hand.sequence(0, PROMPT, WARM)
    hand.run((sequence, len(PROMPT)))
    told = [hand.run((sequence, 1), capture=capture).captures for capture in (False, True, True)]
    assert told[0] is not None and told[1] is not None and told[1].captured == told[0].captured + 1 and told[2] is None


def test_sleep_forgets_captures_and_they_come_again() -> None:
    made = lazy()
    expected = lives(made, GREEDY)
    made.release("kv")
    made.restore("kv")
    assert made._captured.counts.captured == 0 and made._captured.counts.left > 10
    assert lives(made, GREEDY) == expected
    first = made.capture_next().job
    while made.capture_next().job is not None:
        pass
    assert first is not None and lives(made, GREEDY) == expected


@pytest.mark.parametrize(("most", "budget"), [(16, 256), (5, 100)])
def test_a_step_of_nobody_falls_into_the_bucket_that_was_asked_for(most: int, budget: int) -> None:
    made = lazy(max_num_seqs=most)
    made._dummies._tokens = budget
    for rows in range(1, most + 1):
        for tokens in range(rows + 1, budget + 1):
            real = made._dummies._plan(np.array([tokens - rows + 1] + [1] * (rows - 1), np.int32), GREEDY, False)
            sizes = made._captured._prompt_sizes(real)
            assert sizes is not None
            assert made._captured._prompt_sizes(made._dummies.prompts(sizes, GREEDY, False)) == sizes, (rows, tokens)


def test_a_step_with_prompts_is_not_captured_for_a_little_padding() -> None:
    made = lazy()
    while made.capture_next().job is not None:
        pass
    hand, before = Hand(made), made._captured.counts
    rows = [hand.sequence(slot, [slot + 2] * length, WARM) for slot, length in enumerate((6, 2, 2, 2, 2))]
    hand.run(*((row, len(row.tokens)) for row in rows), capture=True)  # 14 tokens in 5 rows: 32 and 16 for 16 and 16
    assert made._captured.counts == before
    for key in [key for key in made._captured._steps if key.tokens == 32]:
        del made._captured._steps[key]
    few = made._captured.counts
    more = [hand.sequence(slot + 5, [slot + 2] * length, WARM) for slot, length in enumerate((6, 2, 2, 2, 2))]
    hand.run(*((row, len(row.tokens)) for row in more), capture=True)  # 64 and 16 are too many
    assert made._captured.counts.captured == few.captured + 1


@pytest.mark.parametrize(("taken", "wanted", "good"), [((512, 256), (384, 256), True), ((1280, 256), (1280, 16), True),
                                                       ((512, 256), (64, 64), False), ((512, 256), (256, 16), False)])  # fmt: skip
def test_padding_counts_tokens_and_rows(taken: tuple[int, int], wanted: tuple[int, int], good: bool) -> None:
    assert nearly_as_good(Bucket(*taken), Bucket(*wanted)) is good


class Failing(EagerGraphs):
    """Graphs that cannot capture any more from some moment on."""

    fails = False

    def capture(self, key: Hashable, fn: Callable[..., Any], inputs: tuple[torch.Tensor, ...]) -> Replay:
        if self.fails:
            fn(*inputs)
            raise DeviceError("no memory for it")
        return super().capture(key, fn, inputs)


def failing() -> tuple[Runner, Failing]:
    made = lazy()
    made.device.graphs = graphs = Failing(made.device.graphs.policy)
    graphs.fails = True
    return made, graphs


@pytest.mark.parametrize("params", [GREEDY, WARM, BIASED])
def test_a_step_that_cannot_be_captured_runs_as_it_is(params: SamplingParams) -> None:
    made, graphs = failing()
    assert lives(made, params, capture=True) == lives(lazy(), params)
    graphs.fails = False
    assert made._captured.counts.left == 0 and made.capture_next().job is None
    before = made._captured.counts.captured
    assert lives(made, params, capture=True) == lives(lazy(), params)
    assert made._captured.counts.captured == before, "one failure ends captures"


def test_a_replayed_step_that_runs_as_it_is_is_planned_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first plan may be of the largest step that a capture serves; the one after it, in the same buffers, is of this step."""
    made, _ = failing()
    made._captured._steps.clear()
    model, seen = made._captured._forward.model, []
    plan, forward = model.plan, model.forward

    def planned(groups: tuple[PagedBatch, ...], buffers: tuple[Any, ...] | None = None) -> tuple[Any, ...]:
        seen.append("again" if buffers is not None else "first")
        return plan(groups, buffers)

    def ran(inputs: ModelInputs) -> ModelOutput:
        seen.append("ran")
        return forward(inputs)

    monkeypatch.setattr(model, "plan", planned)
    monkeypatch.setattr(model, "forward", ran)
    hand = Hand(made)
    row = hand.sequence(0, PROMPT, GREEDY)
    hand.run((row, len(row.tokens)), capture=True)
    assert seen == ["first", "ran", "first", "again", "ran"]


def test_a_capture_in_an_idle_moment_may_fail() -> None:
    made, _ = failing()
    report = made.capture_next()
    assert report.error is not None and "no memory" in report.error
    made.undo_capture()
    assert made._captured.counts.left == 0 and lives(made, WARM) == lives(lazy(), WARM)


def test_rows_that_begin_alike_run_apart_until_their_form_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (captured, cascade):
        monkeypatch.setattr(module, "FEWEST_TOKENS", 64)
    monkeypatch.setattr(cascade, "UNIT", 64)
    made = lazy(shared=True)
    while made.capture_next().job is not None:
        pass
    forms = [key for key in made._captured._steps if any(key.shared)]
    for key in forms:  # as if they had not had their turn
        del made._captured._steps[key]
    made._captured._sharing.clear()
    hand = Hand(made)
    rows = [hand.sequence(slot, [7] * 70 + [slot], SamplingParams(temperature=1.0, seed=11, max_tokens=64)) for slot in range(4)]
    for group in range(len(made.pages.page_sizes)):
        alike = rows[0].table[group]
        for row in rows[1:]:
            row.table[group][: 64 // made.pages.page_sizes[group]] = alike[: 64 // made.pages.page_sizes[group]]
    hand.run(*((row, len(row.tokens)) for row in rows))
    hand.run(*((row, 1) for row in rows))
    assert not any(any(key.shared) for key in made._captured._steps)
    report = made.capture_next()
    assert report.job is not None and "shared tokens" in report.job
    (form,) = [key for key in made._captured._steps if any(key.shared)]
    replays = []
    kept = made._captured._steps[form]
    made._captured._steps[form] = kept._replace(replay=lambda: (replays.append(1), kept.replay())[1])
    hand.run(*((row, 1) for row in rows))
    assert replays == [1]


async def test_a_device_with_fixed_shapes_captures_nothing_after_its_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step falls into a size that was captured before the first request, and none runs as it is."""
    keys = list[Hashable]()
    capture, bucket = NullGraphs.capture, captured.CapturedSteps.bucket

    def noted(self: NullGraphs, key: Hashable, fn: Callable[..., Any], inputs: tuple[torch.Tensor, ...]) -> Replay:
        keys.append(key)
        return capture(self, key, fn, inputs)

    def planned(self: captured.CapturedSteps, plan: StepPlan, use: int = 0) -> Any:
        found = bucket(self, plan, use)
        assert found is not None and not plan.capture
        return found

    monkeypatch.setattr(NullGraphs, "policy", GraphPolicy("captured", (1, 2, 4, 8, 16, 32, 64), (1, 2, 4, 8, 16), static_shapes=True))
    monkeypatch.setattr(NullGraphs, "capture", noted)
    monkeypatch.setattr(captured.CapturedSteps, "bucket", planned)
    config = tiny_config(tmp_path, device="null:h200", num_gpu_blocks_override=300, max_num_seqs=9)
    client = await InProcessClient.start(engine_starter(config))
    try:
        started = len(keys)
        settings = ({}, {"temperature": 1.0}, {"top_p": 0.5, "temperature": 1.0}, {"logit_bias": {3: 1.0}}, {"presence_penalty": 1.0})
        asked = [toy_request(str(n), [5] * (3 + 17 * n), 9, **settings[n % len(settings)]) for n in range(10)]

        async def ask(request: Any) -> int:
            return sum([len(part.token_ids) async for delta in client.generate(request) for part in delta.sequences])

        assert await asyncio.gather(*map(ask, asked)) == [9] * 10
        stats = await client.stats()
        assert (stats.steps_captured, stats.steps_to_capture) == (0, 0) and len(keys) == started > 10
    finally:
        await client.close()


class Ranks:
    """An executor of ranks that answer as they are told."""

    def __init__(self, *answers: list[CaptureReport]) -> None:
        self.answers, self.calls = list(answers), list[str]()

    def collective(self, method: str, **_: Any) -> Any:
        self.calls.append(method)
        return self.answers.pop(0) if method == "capture_next" else None


def plan(capture: bool) -> StepPlan:
    one = np.ones(1, np.int32)
    return StepPlan(0, one, one, one, one, (), one > 0, one > 1, one, capture=capture)


def answer(counts: Captures | None = None) -> StepResult:
    return StepResult(0, np.ones((1, 1), np.int32), np.ones(1, np.int32), captures=counts)


def test_captures_take_a_share_of_the_time_and_wait_for_first_tokens() -> None:
    now = [0.0]
    rule = CaptureRule(Ranks(), Captures(3, 9), lambda: now[0])  # type: ignore[arg-type]
    assert rule.may_capture(lambda: False) and not rule.may_capture(lambda: True)
    rule.submitted(plan(True))
    assert not rule.may_capture(lambda: False), "one at a time"
    rule.committed(plan(True), answer(Captures(4, 9)), 0.1)
    now[0] = 0.1 / SHARE - 0.11
    assert not rule.may_capture(lambda: False)
    now[0] += 0.02
    assert rule.may_capture(lambda: False)
    now[0] += STARVED_SECONDS
    assert not rule.may_capture(lambda: True)
    now[0] += 0.1
    assert rule.may_capture(lambda: True)
    assert CaptureRule(Ranks(), None).patience is None and not CaptureRule(Ranks(), None).may_capture(lambda: False)  # type: ignore[arg-type]


def test_ranks_that_differ_end_the_engine_and_one_that_fails_stops_captures() -> None:
    same, other = CaptureReport(Captures(4, 8), "a"), CaptureReport(Captures(4, 8), "b")
    rule = CaptureRule(Ranks([same, other]), Captures(3, 9))  # type: ignore[arg-type]
    with pytest.raises(EngineDeadError, match="ranks captured different steps"):
        rule.capture()
    ranks = Ranks([same, CaptureReport(Captures(3, 8), "a", "out of memory")])
    rule = CaptureRule(ranks, Captures(3, 9))  # type: ignore[arg-type]
    rule.capture()
    assert ranks.calls == ["capture_next", "undo_capture"]
    assert rule.patience is None and not rule.may_capture(lambda: False)


def test_what_another_rank_could_not_capture_is_forgotten() -> None:
    made = lazy()
    before = made._captured.counts.captured
    assert made.capture_next().counts.captured == before + 1
    made.undo_capture()
    assert made._captured.counts == Captures(before, 0) and made.capture_next().job is None
    assert lives(made, GREEDY) == lives(lazy(), GREEDY)


async def test_a_load_of_decodes_pays_for_no_capture_once_all_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts that come at once, and as many decodes afterwards: each number of rows as it is captured, and no step as it is."""
    seen, keys = list[tuple[int, int, Any]](), list[Any]()
    bucket, capture = captured.CapturedSteps.bucket, EagerGraphs.capture

    def noted(self: captured.CapturedSteps, plan: StepPlan, use: int = 0) -> Any:
        seen.append((plan.num_tokens, plan.num_rows, found := bucket(self, plan, use)))
        return found

    def counted(self: EagerGraphs, key: Hashable, fn: Callable[..., Any], inputs: tuple[torch.Tensor, ...]) -> Replay:
        keys.append(key)
        return capture(self, key, fn, inputs)

    monkeypatch.setattr(captures, "IDLE_SECONDS", 0.001)
    monkeypatch.setattr(captured.CapturedSteps, "bucket", noted)
    monkeypatch.setattr(EagerGraphs, "capture", counted)
    client = await InProcessClient.start(lambda sink: toy_engine(sink, burst=2, warm=True))
    try:

        async def load(rows: int, tokens: int) -> None:
            asked = [toy_request(f"{rows} {tokens} {n}", [n + 2] * 16, tokens, temperature=1.0, seed=n) for n in range(rows)]
            async with asyncio.TaskGroup() as group:
                for one in asked:
                    group.create_task(_all_of(client, one))

        while (await client.stats()).steps_to_capture:
            await asyncio.sleep(0.01)
        before = (len(keys), seen.clear())[0]
        for rows in (3, 5, 16):
            for tokens in (1, 12):
                await load(rows, tokens)
        while (await client.stats()).steps_to_capture:
            await asyncio.sleep(0.01)
        assert before > 10 and not any(key.uniform for key in keys[before:]), "idle moments bring captures for other sizes of prompts"
        decodes = [(rows, found) for tokens, rows, found in seen if tokens == rows]
        assert {rows for rows, _ in decodes} >= {3, 5, 16} and len(seen) > len(decodes)
        for rows, found in decodes:
            assert found is not None and found.rows == min(size for size in SIZES if size >= rows)
        assert all(found is not None for _, _, found in seen)
    finally:
        await client.close()


async def _all_of(client: InProcessClient, request: Any) -> None:
    async for _ in client.generate(request):
        pass


@pytest.mark.parametrize("world", [0, 2])
async def test_an_idle_engine_captures_everything(world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captures, "IDLE_SECONDS", 0.001)
    client = await InProcessClient.start(lambda sink: toy_engine(sink, world, burst=2, warm=True))
    try:

        async def ask(name: str, prompt: list[int]) -> list[int]:
            deltas = client.generate(toy_request(name, prompt, 8))
            return [token async for delta in deltas for sequence in delta.sequences for token in sequence.token_ids]

        expected = [dense_greedy(ToyModel(), prompt, 8) for prompt in (PROMPT, OTHER)]
        assert await asyncio.gather(ask("a", PROMPT), ask("b", OTHER)) == expected
        while (stats := await client.stats()).steps_to_capture:
            await asyncio.sleep(0.01)
        assert stats.steps_captured > 10
        assert await asyncio.gather(ask("c", PROMPT), ask("d", OTHER)) == expected
        await client.call("sleep", level=1)
        await client.call("wake")
        assert await ask("e", PROMPT) == expected[0]
    finally:
        await client.close()
