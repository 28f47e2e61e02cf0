"""Beam search: the rules against transformers' own, and in the scheduler against the rules run alone."""

from __future__ import annotations

import pytest
import torch
from pagoda.hal.errors import CapacityError, RequestError
from pagoda.serving.engine.beams import BeamSearch
from pagoda.serving.engine.messages import FinishReason
from scheduler_toy import Toy, expected_beams, search_alone, toy_facts
from transformers import LlamaConfig, LlamaForCausalLM


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("ends", [(3,), (3, 5)])
def test_the_rules_are_those_of_transformers(width, penalty, ends):
    torch.manual_seed(width)
    config = LlamaConfig(
        vocab_size=24, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=64
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.lm_head.weight *= 12
    prompt = [1, 8, 9]

    def top(tokens):
        with torch.no_grad():
            values = torch.log_softmax(model(torch.tensor([tokens])).logits[0, -1].float(), -1)
        best = values.topk(24)
        return list(zip(best.indices.tolist(), best.values.tolist()))

    found = search_alone(BeamSearch(width, frozenset(ends), penalty), prompt, 15, top)
    answer = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, 3, dtype=torch.long),
        num_beams=width,
        num_return_sequences=width,
        do_sample=False,
        max_length=15,
        length_penalty=penalty,
        eos_token_id=list(ends),
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    rows = [_until(row[3:].tolist(), ends) for row in answer.sequences]
    if width == 1:  # one beam is greedy search there
        assert list(found[0].tokens) == rows[0]
        return
    assert [list(one.tokens) for one in found] == rows
    assert [one.score for one in found] == pytest.approx(answer.sequences_scores.tolist(), abs=1e-4)


def _until(tokens, ends):
    for i, token in enumerate(tokens):
        if token in ends:
            return tokens[: i + 1]
    return tokens


@pytest.mark.parametrize("pages", [120, 17])
@pytest.mark.parametrize("overlap", [1, 3])
@pytest.mark.parametrize("budget", [3, 16])
def test_beams_in_the_scheduler_are_the_rules_alone(pages, overlap, budget):
    toy = Toy(toy_facts(num_pages=pages, overlap=overlap), max_num_seqs=5, max_num_batched_tokens=budget)
    for i, width in enumerate((4, 2, 3)):
        toy.submit(f"b{i}", range(i, i + 10), max_tokens=9, n=2, logprobs=2, request={"beam_width": width})
        toy.submit(f"s{i}", range(i, i + 7), max_tokens=12, ignore_eos=True)
    toy.drain()
    if pages == 17 and budget == 16:
        assert toy.scheduler.stats().preemptions > 0
    for i in range(3):
        request = toy.requests[f"b{i}"]
        expected = expected_beams(request, 64)
        (delta,) = toy.deltas[f"b{i}"]
        assert [part.token_ids for part in delta.sequences] == [one.tokens for one in expected]
        assert [part.cumulative_logprob for part in delta.sequences] == pytest.approx([one.cumulative for one in expected], abs=1e-5)
        assert [part.finish_reason is FinishReason.STOP for part in delta.sequences] == [one.stopped for one in expected]
        for part in delta.sequences:
            assert [entry.token_id for entry in part.logprobs] == list(part.token_ids)
            assert sum(entry.logprob for entry in part.logprobs) == pytest.approx(part.cumulative_logprob, abs=1e-5)
            assert all(len(entry.top_ids) == 2 for entry in part.logprobs)
        toy.check_tokens(f"s{i}")


def test_two_searches_that_block_each_other_end():
    """Four slots, two searches of three beams: each gets some of its beams in, and neither all."""
    toy = Toy(toy_facts(num_pages=60, overlap=1), max_num_seqs=4)
    for name in "ab":
        toy.submit(name, [1, 2, 3, ord(name) % 50], max_tokens=8, n=3, request={"beam_width": 3})
    toy.drain()
    assert all(len(toy.deltas[name][-1].sequences) == 3 for name in "ab")


def test_beams_share_pages_and_copy_the_last():
    toy = Toy(toy_facts(num_pages=60))
    toy.submit("a", range(16), max_tokens=10, ignore_eos=True, request={"beam_width": 4})
    most = 0
    while toy.step():
        most = max(most, toy.scheduler.stats().pages_used)
    assert most <= 4 + 4 * 4
    assert sum(len(plan.copies.target) for plan in toy.plans if plan.copies) > 0
    assert all(plan.num_tokens <= 4 for plan in toy.plans[1:])


def test_an_aborted_search_answers_for_each_of_its_n():
    toy = Toy()
    toy.submit("a", range(10), max_tokens=20, n=2, request={"beam_width": 3})
    for _ in range(4):
        toy.step()
    toy.hear(toy.scheduler.abort(["a"]))
    assert toy.reasons["a"] == {0: FinishReason.ABORT, 1: FinishReason.ABORT}
    toy.drain()


def test_what_cannot_be_searched_is_refused():
    toy = Toy(toy_facts(num_pages=26))
    for beam_width, params, message in (
        (5, {}, "at most 4 beams"),
        (3, {"n": 4}, "n must not be larger"),
        (2, {"repetition_penalty": 1.2}, "penalties are not defined"),
    ):
        with pytest.raises(RequestError, match=message):
            toy.submit("a", [1, 2], request={"beam_width": beam_width}, **params)
    for penalty in (1e300, -17.0, float("nan")):
        with pytest.raises(RequestError, match=r"length_penalty=.* must be from -16 to 16"):
            toy.submit("a", [1, 2], request={"beam_width": 2, "length_penalty": penalty})
    with pytest.raises(CapacityError, match="KV pages and the pool has 25"):
        toy.submit("a", range(4), max_tokens=32, request={"beam_width": 4})
    assert not toy.scheduler.has_work
