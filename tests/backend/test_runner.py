"""The runner on every device here: chunked, preempted, prefix-hit, mixed and forked sequences give the oracle's greedy tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from pagoda.hal.comm import Topology
from pagoda.hal.discovery import INSTRUMENTS, find_all
from pagoda.serving.engine import captured, cascade
from pagoda.serving.engine.params import SamplingParams
from pagoda.serving.engine.plan import PageCopies
from pagoda.serving.engine.runner import Runner
from plans import GREEDY, Hand, Sequence
from toy import EOS, VOCAB, ToyModel, dense_greedy, dense_logits, toy_runner

PROMPT = [5, 17, 80, 3, 44, 9, 61, 2, 33, 70, 12, 8, 25]
OTHER = [90, 4, 6, 31]


DEVICES = ["reference", *(one.name for one in find_all() if one.probe.available and one.name not in INSTRUMENTS)]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def runner(device: str = "reference", **settings: object) -> Runner:
    return toy_runner(Topology(0, 1), device, **settings)  # type: ignore[arg-type]


def test_greedy_tokens_are_the_oracles(device: str) -> None:
    hand = Hand(runner(device))
    assert hand.generate(hand.sequence(0, PROMPT), 12) == dense_greedy(ToyModel(), PROMPT, 12)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("chunk", [1, 3, 4, 5])
def test_chunked_equals_plain(device: str, chunk: int, dtype: str) -> None:
    plain, chunked = Hand(runner(device, dtype=dtype)), Hand(runner(device, dtype=dtype))
    expected = plain.generate(plain.sequence(0, PROMPT), 10)
    assert chunked.generate(chunked.sequence(3, PROMPT), 10, chunk) == expected


def test_preempted_and_recomputed_equals_plain(device: str) -> None:
    hand = Hand(runner(device))
    first = hand.sequence(0, PROMPT)
    hand.generate(first, 4)
    again = hand.sequence(5, first.tokens, prompt_len=len(PROMPT))
    assert hand.generate(again, 10, chunk=6) == dense_greedy(ToyModel(), PROMPT, 10)


def test_prefix_hit_equals_plain(device: str) -> None:
    hand = Hand(runner(device))
    first = hand.sequence(0, PROMPT)
    hand.generate(first, 1)
    hit = hand.sequence(1, PROMPT[:8] + OTHER)
    for group in range(2):
        hit.table[group][:2] = first.table[group][:2]
    hit.computed = 8
    assert hand.generate(hit, 8) == dense_greedy(ToyModel(), PROMPT[:8] + OTHER, 8)


def test_mixed_batch_equals_each_alone(device: str) -> None:
    hand = Hand(runner(device))
    first, second, third = (hand.sequence(slot, tokens) for slot, tokens in ((2, PROMPT), (0, OTHER), (7, PROMPT[3:])))
    hand.run((second, 4))
    hand.run((second, 1), (first, 5))
    hand.run((second, 1), (first, 8), (third, 10))
    for _ in range(4):
        hand.run((first, 1), (third, 1), (second, 1))
    for sequence in (first, second, third):
        prompt = sequence.tokens[: sequence.prompt_len]
        assert sequence.output == dense_greedy(ToyModel(), prompt, len(sequence.output)) and len(sequence.output) >= 5


def test_tokens_stay_on_the_device_between_overlapping_steps(device: str) -> None:
    hand = Hand(runner(device))
    first, second = hand.sequence(0, PROMPT), hand.sequence(1, OTHER)
    hand.run((first, 13), (second, 4))
    pending = []
    for _ in range(3):
        plan = hand.plan((first, 1), (second, 1), on_device=True)
        assert set(plan.token_ids) == {-1}
        pending.append((list(hand.rows), hand.runner.launch(plan)))
        for row in hand.rows:
            row.tokens.append(0)  # not known yet
        if len(pending) == 2:  # two in flight, as `RunnerLimits.in_flight` allows
            _learn(*pending.pop(0))
    for rows, started in pending:
        _learn(rows, started)
    assert [first.output[:4], second.output[:4]] == [dense_greedy(ToyModel(), p, 4) for p in (PROMPT, OTHER)]


def _learn(rows: list[Sequence], pending: object) -> None:
    for row, token in zip(rows, pending.wait().tokens[:, 0]):  # type: ignore[attr-defined]
        row.tokens[row.tokens.index(0, row.prompt_len)] = int(token)


def test_copied_pages_continue_a_fork(device: str) -> None:
    hand = Hand(runner(device))
    first = hand.sequence(0, PROMPT)
    hand.generate(first, 2)
    fork = hand.sequence(1, first.tokens, prompt_len=len(PROMPT))
    fork.computed = first.computed
    source = np.array([page for group in first.table for page in group[:4]], np.int64)
    target = np.array([page for group in fork.table for page in group[:4]], np.int64)
    hand.run((fork, 1), copies=PageCopies(source, target))
    hand.run((first, 1))
    assert hand.generate(fork, 6) == hand.generate(first, 6) == dense_greedy(ToyModel(), PROMPT, 6)


def test_logprobs_are_of_raw_logits_whatever_the_settings(device: str) -> None:
    hand = Hand(runner(device))
    warm = SamplingParams(temperature=5.0, top_k=3, seed=11, logprobs=4, logit_bias={7: 3.0}, repetition_penalty=1.5, max_tokens=64)
    sequence, plain = hand.sequence(0, PROMPT, warm), hand.sequence(1, OTHER)
    result = hand.run((plain, 4), (sequence, 13))
    expected = dense_logits(ToyModel(), PROMPT)[-1].log_softmax(-1)
    (row,) = result.logprobs.values()
    assert list(result.logprobs) == [1] and row.token_ids[0] == sequence.output[0]
    torch.testing.assert_close(float(row.logprobs[0]), float(expected[sequence.output[0]]), atol=1e-4, rtol=0)
    assert row.ranks[0] == 1 + int((expected > expected[sequence.output[0]]).sum())
    assert row.top_ids[0].tolist() == expected.topk(4).indices.tolist()
    np.testing.assert_allclose(row.top_logprobs[0], expected.topk(4).values.numpy(), atol=1e-4)


def test_prompt_logprobs_over_chunks(device: str) -> None:
    hand = Hand(runner(device))
    sequence = hand.sequence(0, PROMPT, SamplingParams(temperature=0, prompt_logprobs=2, max_tokens=8))
    other = hand.sequence(1, OTHER)
    parts = [hand.run((sequence, 6)), hand.run((other, 4), (sequence, 7)), hand.run((sequence, 1))]
    scored = [result.prompt_logprobs[row] for result, row in zip(parts, (0, 1))]
    assert not parts[2].prompt_logprobs
    expected = dense_logits(ToyModel(), PROMPT).log_softmax(-1)
    own = [float(expected[at, token]) for at, token in enumerate(PROMPT[1:])]
    np.testing.assert_allclose(np.concatenate([part.logprobs for part in scored]), own, atol=1e-4)
    assert np.concatenate([part.token_ids for part in scored]).tolist() == PROMPT[1:]
    assert np.concatenate([part.top_ids for part in scored]).tolist() == expected[:-1].topk(2).indices.tolist()


def test_a_row_of_nan_is_named_and_harms_no_other(device: str) -> None:
    hand = Hand(runner(device, poison=50))
    good, bad = hand.sequence(0, PROMPT), hand.sequence(1, [*OTHER, 50])
    result = hand.run((good, 13), (bad, 5))
    assert result.bad_rows == (1,)
    assert good.output == dense_greedy(ToyModel(), PROMPT, 1)


def test_slots_are_clean_when_used_again(device: str) -> None:
    hand = Hand(runner(device))
    biased = hand.sequence(0, PROMPT, SamplingParams(temperature=0, logit_bias={EOS: 1e4}, repetition_penalty=2.0, max_tokens=8))
    assert hand.generate(biased, 2)[0] == EOS
    assert hand.generate(hand.sequence(0, OTHER), 5) == dense_greedy(ToyModel(), OTHER, 5)


def test_padded_steps_of_every_size_equal_plain_ones(device: str) -> None:
    made = runner(device)
    made.warm_up()
    hand = Hand(made)
    sequences = [hand.sequence(slot, [*PROMPT[slot % 5 :], slot + 3]) for slot in range(11)]
    for count in (1, 3, 4, 7, 11, 2, 11):
        behind = [one for one in sequences[:count] if one.computed + 1 < len(one.tokens)]
        if behind:
            hand.run(*((one, len(one.tokens) - one.computed) for one in behind))
        hand.run(*((one, 1) for one in sequences[:count]))
    for one in sequences:
        prompt = one.tokens[: one.prompt_len]
        assert one.output == dense_greedy(ToyModel(), prompt, len(one.output)) and len(one.output) >= 2


def test_every_kind_of_sampling_in_padded_steps(device: str) -> None:
    warm = [
        SamplingParams(seed=3, temperature=0.9),
        SamplingParams(seed=4, top_k=5, top_p=0.8, min_p=0.01),
        SamplingParams(seed=5, presence_penalty=1.0, frequency_penalty=0.4, repetition_penalty=1.3),
        SamplingParams(temperature=0, logit_bias={7: 2.0}, logprobs=2),
        SamplingParams(seed=6, allowed_token_ids=(5, 6, 7, 8)),
    ]
    alone = [Hand(runner(device)) for _ in warm]
    expected = [one.generate(one.sequence(0, PROMPT, params), 6) for one, params in zip(alone, warm)]
    hand = Hand(runner(device))
    sequences = [hand.sequence(slot, PROMPT, params) for slot, params in enumerate(warm)]
    hand.run(*((one, len(PROMPT)) for one in sequences))
    for _ in range(5):
        hand.run(*((one, 1) for one in sequences))
    assert [one.output for one in sequences] == expected


@pytest.mark.parametrize("temperature", [0.0, 1.2])
def test_masks_in_recorded_steps(temperature: float) -> None:
    """Rows change places from step to step, so that each replay meets other masks, rows without any beside them and those that pad."""
    kinds = [
        SamplingParams(temperature=temperature, seed=slot, allowed_token_ids=tuple(range(7 * slot, VOCAB, slot + 1)) if slot % 3 else ())
        for slot in range(5)
    ]
    alone = [Hand(runner()) for _ in kinds]
    expected = [one.generate(one.sequence(0, PROMPT, params), 8) for one, params in zip(alone, kinds, strict=True)]
    made = runner("cpu", tuned=True)
    hand = Hand(made)
    sequences = [hand.sequence(slot, PROMPT, params) for slot, params in enumerate(kinds)]
    hand.run(*((one, len(PROMPT)) for one in sequences))
    for turn in range(7):
        hand.run(*((one, 1) for one in sequences[turn % 5 :] + sequences[: turn % 5]))
    assert [one.output for one in sequences] == expected
    assert len(made._captured._steps) == 1 and made._captured._logits is None  # one replay with the sampler in it


def test_sleep_and_wake(device: str) -> None:
    made = runner(device)
    hand = Hand(made)
    expected = hand.generate(hand.sequence(0, PROMPT), 5)
    before = made.memory()["kv"]
    made.release("kv")
    assert before > 0 and made.memory()["kv"] == 0
    made.restore("kv")
    assert made.memory()["kv"] == before
    assert hand.generate(hand.sequence(0, PROMPT), 5) == expected


def test_a_step_allocates_nothing_that_stays() -> None:
    made = runner()
    hand = Hand(made)
    sequence = hand.sequence(0, PROMPT)
    hand.generate(sequence, 3)
    before = made.memory()
    hand.generate(sequence, 8)
    assert made.memory() == before and VOCAB and GREEDY.greedy


def test_a_closed_runner_gives_its_memory_back(device: str) -> None:
    made = runner(device)
    Hand(made).generate(Hand(made).sequence(0, PROMPT), 2)
    memory = made.device.memory
    assert memory.stats().used["kv"] > 0 and memory.stats().used["work"] > 0
    made.close()
    assert memory.stats().used == {"weights": 0, "kv": 0, "work": 0}


def test_a_burst_gives_what_single_steps_give() -> None:
    """Rows of different lengths, of which one ends within the burst, greedy and sampled; then on with single steps, as if nothing was."""
    for params in (GREEDY, SamplingParams(temperature=1.0, seed=11, top_p=0.9)):
        single, burst = (Hand(runner(burst=most)) for most in (1, 4))
        expected = [single.generate(single.sequence(slot, tokens, params), 9) for slot, tokens in ((0, PROMPT), (1, OTHER), (2, [7]))]
        rows = [burst.sequence(slot, tokens, params) for slot, tokens in ((0, PROMPT), (1, OTHER), (2, [7]))]
        burst.run(*((row, len(row.tokens)) for row in rows))
        for runs in ([4, 3, 1], [3, 4, 2]):
            assert burst.burst(rows, runs).counts.tolist() == runs
        while any(len(row.output) < 9 for row in rows):
            burst.run(*((row, 1) for row in rows))
        assert [row.output[:9] for row in rows] == expected


def test_a_warm_up_meets_shared_beginnings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode steps of 4, 8 and 16 rows that begin alike are captured ahead of need, and leave what padding reads as it was."""
    for module in (captured, cascade):
        monkeypatch.setattr(module, "FEWEST_TOKENS", 64)
    monkeypatch.setattr(cascade, "UNIT", 64)
    warmed = runner(burst=2, shared=True)
    warmed.warm_up()
    while warmed.capture_next().job is not None:
        pass
    rows = {key[1] for key in warmed._captured._steps if key[6] == (True, True)}
    assert rows == {4, 8, 16}
    assert warmed.pages.pool is not None and torch.isfinite(warmed.pages.pool[:2].view(torch.float32)).all()
    hand = Hand(warmed)
    assert hand.generate(hand.sequence(0, PROMPT), 8) == dense_greedy(ToyModel(), PROMPT, 8)
