"""The sampler against a slow one, token by token in plain Python floats: filters, penalties, edits, seeds, order of the stages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pagoda.hal.discovery import find
from pagoda.ops.sampling import uniform
from pagoda.ops.table import kernel_table
from pagoda.serving.engine.batch import BatchPacker
from pagoda.serving.engine.params import SamplingParams
from pagoda.serving.engine.plan import Admission, StepPlan
from pagoda.serving.engine.sampler import Sampled, Sampler
from pagoda.serving.engine.settings import SamplingSlots, bitmask, stream_seed
from toy import toy_table

VOCAB = 97


class Bench:
    """Sampler and packer over decode rows, one a slot."""

    def __init__(self, tuned: bool = False) -> None:
        """`tuned`: by the CPU's own kernels, which read masks beside the logits."""
        backend = find("cpu")
        device = backend.open()
        self.slots = SamplingSlots(16, VOCAB)
        self.sampler = Sampler(device, kernel_table(backend, device.info) if tuned else toy_table(device), VOCAB, 16)
        assert self.sampler.masks_inside == tuned
        self.packer = BatchPacker(device, (4,), self.slots, 1 << 14, 2, every_mask=tuned)

    def admit(self, slot: int, params: SamplingParams, prompt: Sequence[int] = (3,), output: Sequence[int] = (), sequence: int = 0) -> None:
        admission = Admission(slot, params, tuple(prompt), tuple(output), sequence, eos_ids=(1,))
        self.slots.admit(admission)
        self.sampler.admit(admission)

    def sample(self, logits: torch.Tensor, slots: Sequence[int], draws: Sequence[int]) -> Sampled:
        rows = len(slots)
        ones = np.ones(rows, np.int32)
        plan = StepPlan(
            0,
            np.array(slots, np.int32),
            7 * ones,
            ones,
            ones,
            (np.ones((rows, 2), np.int32),),
            np.ones(rows, bool),
            np.zeros(rows, bool),
            np.array(draws, np.int32),
        )
        return self.sampler(logits, self.packer.pack(plan))


def slow(logits: Sequence[float], params: SamplingParams, draw: int, prompt: Sequence[int] = (), output: Sequence[int] = ()) -> int:
    """One row, by the definitions: edits, penalties, temperature, min-p, top-k, top-p, then the inverse of the cumulated probability."""
    row = [float(x) for x in logits]
    for token in range(VOCAB):
        if params.allowed_token_ids and token not in params.allowed_token_ids:
            row[token] = -math.inf
        row[token] += params.logit_bias.get(token, 0.0)
        if token in (1, *params.stop_token_ids) and draw < params.min_tokens:
            row[token] = -math.inf
        if any(word[-1] == token and tuple(output[len(output) - len(word) + 1 :]) == word[:-1] for word in params.bad_words_token_ids):
            row[token] = -math.inf
        if token in prompt or token in output:
            row[token] = row[token] / params.repetition_penalty if row[token] > 0 else row[token] * params.repetition_penalty
        times = list(output).count(token)
        row[token] -= params.frequency_penalty * times + params.presence_penalty * (times > 0)
    if params.temperature == 0:
        return max(range(VOCAB), key=lambda token: (row[token], -token))
    row = [x / params.temperature for x in row]
    top = max(row)
    weights = sorted(((math.exp(x - top), -token) for token, x in enumerate(row)), reverse=True)
    kept = [entry for entry in weights if entry[0] >= params.min_p * weights[0][0]][: params.top_k or VOCAB]
    share, total = 0.0, sum(weight for weight, _ in kept)
    nucleus = []
    for weight, token in kept:
        if nucleus and share >= params.top_p:
            break
        nucleus.append((weight, -token))
        share += weight / total
    u = float(uniform(torch.tensor([params.seed or 0]), torch.tensor([draw])))
    target, passed = u * sum(weight for weight, _ in nucleus), 0.0
    for weight, token in sorted(nucleus, key=lambda entry: entry[1]):
        passed += weight
        if passed > target:
            return token
    return max(token for _, token in nucleus)


def logits_of(seed: int, rows: int = 1) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


TEMPERATURES = st.sampled_from([0.0, 0.3, 1.0, 2.5])


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    temperature=TEMPERATURES,
    top_k=st.sampled_from([0, 1, 5, 40, 200]),
    top_p=st.sampled_from([1.0, 0.9, 0.3]),
    min_p=st.sampled_from([0.0, 0.02, 0.3]),
    draw=st.integers(0, 400),
)
def test_filters(seed: int, temperature: float, top_k: int, top_p: float, min_p: float, draw: int) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed * 7919)
    bench, logits = Bench(), logits_of(seed)
    bench.admit(3, params)
    assert bench.sample(logits, [3], [draw]).tokens.tolist() == [slow(logits[0].tolist(), params, draw)]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    repetition=st.sampled_from([0.7, 1.0, 1.4]),
    presence=st.sampled_from([-1.0, 0.0, 1.5]),
    frequency=st.sampled_from([-0.5, 0.0, 0.8]),
    prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30),
    output=st.lists(st.integers(0, 20), max_size=30),
    temperature=TEMPERATURES,
)
def test_penalties(
    seed: int, repetition: float, presence: float, frequency: float, prompt: list[int], output: list[int], temperature: float
) -> None:
    params = SamplingParams(
        temperature=temperature, repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency, seed=seed
    )
    bench, logits = Bench(), logits_of(seed, 2)
    bench.admit(5, params, prompt, output)
    bench.admit(2, SamplingParams(temperature=0))
    tokens = bench.sample(logits, [2, 5], [0, len(output)]).tokens.tolist()
    assert tokens == [int(logits[0].argmax()), slow(logits[1].tolist(), params, len(output), prompt, output)]


def test_penalties_count_what_was_sampled_since() -> None:
    params = SamplingParams(temperature=0, frequency_penalty=1.1, presence_penalty=0.3)
    bench, logits, output = Bench(), logits_of(4), []
    bench.admit(1, params)
    for draw in range(25):
        (token,) = bench.sample(logits.clone(), [1], [draw]).tokens.tolist()
        assert token == slow(logits[0].tolist(), params, draw, (3,), output)
        output.append(token)
    assert len(set(output)) > 5


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "edit",
    [
        {"logit_bias": {5: 9.0, 6: -50.0}},
        {"allowed_token_ids": (4, 9, 33, 96)},
        {"bad_words_token_ids": ((40,), (7, 8), (8, 7, 41))},
        {"min_tokens": 4, "stop_token_ids": (12, 13), "max_tokens": 50},
        {"logit_bias": {9: 4.0}, "allowed_token_ids": (4, 9), "repetition_penalty": 3.0},
    ],
)
@pytest.mark.parametrize("tuned", [False, True])
def test_edits(edit: dict[str, object], temperature: float, tuned: bool) -> None:
    params = SamplingParams(temperature=temperature, seed=77, **edit)  # type: ignore[arg-type]
    output = [8, 7]
    for seed in range(12):
        for draw in (3, 4):
            bench, logits = Bench(tuned), logits_of(seed, 2)
            logits[1, [1, 8, 12, 13, 40, 41]] += 6  # what is forbidden would win
            bench.admit(0, SamplingParams(temperature=0))
            bench.admit(4, params, output=output)
            expected = slow(logits[1].tolist(), params, draw, (3,), output)
            assert bench.sample(logits, [0, 4], [9, draw]).tokens.tolist()[1] == expected


def test_bad_words_follow_the_tokens_that_came() -> None:
    bench = Bench()
    bench.admit(0, SamplingParams(temperature=0, bad_words_token_ids=((7, 8),)), prompt=(1, 2), output=())
    logits = torch.zeros(1, VOCAB)
    logits[0, 8] = 5
    logits[0, 6] = 4
    assert bench.sample(logits.clone(), [0], [0]).tokens.tolist() == [8]
    slots, one = np.array([0], np.int32), np.array([1], np.int32)
    bench.slots.observe(slots, 2 * one, one, 7 * one)  # position 2 is the first generated token: 7
    assert bench.sample(logits.clone(), [0], [1]).tokens.tolist() == [6]
    bench.slots.observe(slots, 3 * one, one, 6 * one)
    assert bench.sample(logits.clone(), [0], [2]).tokens.tolist() == [8]


def test_a_seed_gives_the_same_tokens_whatever_the_batch() -> None:
    logits, params = logits_of(1), SamplingParams(temperature=1.3, top_p=0.95, seed=-(2**62) + 5)
    alone = Bench()
    alone.admit(7, params)
    expected = [alone.sample(logits.clone(), [7], [draw]).tokens.item() for draw in range(40)]
    crowd = Bench()
    for slot in range(16):
        crowd.admit(slot, params if slot == 2 else SamplingParams(temperature=slot / 8, top_k=slot, seed=slot))
    order = [9, 14, 2, 0, 5]
    many = logits.expand(5, -1)
    assert [crowd.sample(many.clone(), order, [3, 1, draw, 2, 8]).tokens[2].item() for draw in range(40)] == expected
    assert len(set(expected)) > 4


def test_sequences_of_a_request_have_streams_of_their_own() -> None:
    bench, logits = Bench(), logits_of(2).expand(3, -1) / 3
    for sequence in range(3):
        bench.admit(sequence, SamplingParams(seed=11), sequence=sequence)
    drawn = np.array([bench.sample(logits.clone(), [0, 1, 2], [draw] * 3).tokens.tolist() for draw in range(30)])
    assert not (drawn[:, 0] == drawn[:, 1]).all() and not (drawn[:, 1] == drawn[:, 2]).all()
    seeds = [stream_seed(2**63 - 1, sequence) for sequence in range(4)]
    assert len(set(seeds)) == 4 and all(-(2**63) <= seed < 2**63 for seed in seeds)


def test_draws_have_the_right_frequencies() -> None:
    bench = Bench()
    bench.admit(0, SamplingParams(seed=5))
    logits = torch.full((1, VOCAB), -30.0)
    logits[0, :3] = torch.tensor([0.6, 0.3, 0.1]).log()
    counts = np.bincount([bench.sample(logits.clone(), [0], [draw]).tokens.item() for draw in range(2000)], minlength=3)
    np.testing.assert_allclose(counts[:3] / 2000, [0.6, 0.3, 0.1], atol=0.035)


def test_nan_rows_are_found_under_every_setting() -> None:
    for params in (SamplingParams(temperature=0), SamplingParams(), SamplingParams(logit_bias={3: 1.0}, top_k=4)):
        bench, logits = Bench(), logits_of(3, 3)
        for slot in range(3):
            bench.admit(slot, params)
        logits[1, 40] = float("nan")
        sampled = bench.sample(logits, [0, 1, 2], [0, 0, 0])
        assert sampled.bad.tolist() == [False, True, False]
        assert all(0 <= token < VOCAB for token in sampled.tokens.tolist())


def test_masks_inside_leave_the_logits_and_their_logprobs_as_they_are() -> None:
    """A row with a mask, one without, one that asks for logprobs; NaN that nobody may choose spoils no row."""
    bench, logits = Bench(tuned=True), logits_of(6, 3)
    logits[0, 3] = float("nan")
    bench.admit(0, SamplingParams(temperature=0, allowed_token_ids=(4, 90)))
    bench.admit(1, SamplingParams(temperature=0))
    bench.admit(2, SamplingParams(temperature=0, allowed_token_ids=(5, 96), logprobs=2))
    before = logits.clone()
    sampled = bench.sample(logits, [0, 1, 2], [0, 0, 0])
    best = [max(ids, key=lambda token: float(before[row, token])) for row, ids in ((0, (4, 90)), (1, range(VOCAB)), (2, (5, 96)))]
    assert sampled.tokens.tolist() == best and not sampled.bad.any()
    assert torch.equal(logits.nan_to_num(9.0), before.nan_to_num(9.0)) and sampled.logprobs is not None
    assert float(sampled.logprobs.own[0]) == pytest.approx(float(before[2].log_softmax(0)[best[2]]))


def test_infinite_bans_are_not_taken_for_nan() -> None:
    bench, logits = Bench(), logits_of(3)
    logits[0, 5:] = float("-inf")
    bench.admit(0, SamplingParams(seed=1, bad_words_token_ids=((7,),), allowed_token_ids=(0, 1, 2, 30)))
    sampled = bench.sample(logits, [0], [0])
    assert not sampled.bad.any() and sampled.tokens.item() in (0, 1, 2)


def test_penalty_memory_exists_only_for_slots_that_need_it() -> None:
    bench = Bench()
    device = bench.packer.device
    before = device.memory.stats().used["work"]
    for slot in range(8):
        bench.admit(slot, SamplingParams(logit_bias={1: 1.0}))
    assert device.memory.stats().used["work"] == before
    for slot in range(6):
        bench.admit(slot, SamplingParams(temperature=0, presence_penalty=1.0), output=(slot,))
    assert device.memory.stats().used["work"] == before + 8 * VOCAB * (1 + 4)
    logits = torch.zeros(1, VOCAB)
    assert [bench.sample(logits.clone(), [slot], [1]).tokens.item() for slot in range(3)] == [1, 0, 0]


def test_bitmask_bits() -> None:
    words = bitmask((0, 31, 32, 96), VOCAB).view(np.uint32)
    assert words.tolist() == [0x80000001, 1, 0, 1] and all(a <= b for a, b in pairwise([0, *words[2:].tolist()]))


def test_logits_of_the_models_dtype_give_the_tokens_of_the_same_numbers_in_float32() -> None:
    bench = Bench()
    params = (SamplingParams(temperature=0), SamplingParams(seed=3, top_p=0.8), SamplingParams(seed=4, logit_bias={5: 2.0}, logprobs=2))
    for slot, one in enumerate(params):
        bench.admit(slot, one)
    logits = (torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(1)) * 2).bfloat16()
    before = logits.clone()
    found, wanted = bench.sample(logits, (0, 1, 2), (0, 0, 0)), bench.sample(logits.float(), (0, 1, 2), (0, 0, 0))
    assert torch.equal(logits, before)
    assert torch.equal(found.tokens, wanted.tokens)
    assert found.logprobs is not None and wanted.logprobs is not None
    assert all(torch.equal(a, b) for a, b in zip(found.logprobs, wanted.logprobs, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masks_leave_the_logits_that_logprobs_are_of(dtype: torch.dtype) -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(4)).to(dtype)
    bench, allowed = Bench(), (5, 40, 96)
    for slot, params in enumerate((SamplingParams(temperature=0.0), SamplingParams(temperature=0.0, allowed_token_ids=allowed))):
        bench.admit(slot, params)
    bench.admit(2, SamplingParams(temperature=0.0, allowed_token_ids=allowed, logprobs=2))
    best = [max(allowed, key=lambda token, row=row: float(row[token])) for row in logits]  # type: ignore[misc]
    expected = [int(logits[0].argmax()), *best[1:]]
    assert bench.sample(logits[:2].clone(), [0, 1], [0, 0]).tokens.tolist() == expected[:2]
    sampled = bench.sample(logits.clone(), [0, 1, 2], [0, 0, 0])
    assert sampled.tokens.tolist() == expected and sampled.logprobs is not None
    raw = logits[2].double().log_softmax(-1)
    assert float(sampled.logprobs.own[0]) == pytest.approx(float(raw[best[2]]), abs=1e-5)
    assert sampled.logprobs.top_ids[0].tolist() == raw.topk(2).indices.tolist()
