"""Recurrent states in pages: a step reads the state after exactly the tokens before it, whoever computed it, and pages come back."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from pagoda.hal.kv import CacheGroup, CacheKind, LayerCache, StatePart
from pagoda.serving.engine.messages import EngineRequest
from pagoda.serving.engine.params import SamplingParams
from pagoda.serving.engine.plan import RunnerFacts, StepPlan, StepResult
from pagoda.serving.engine.scheduler import Scheduler, SchedulerConfig

UNIT, VOCAB = 4, 50
TOKENS = CacheGroup(CacheKind.FULL, (0,), (LayerCache(CacheKind.FULL, 1, 8, 8, "float32"),), UNIT, 256)
STATE = LayerCache.of_state(StatePart((48,), "float32"))
ALONE = CacheGroup(CacheKind.STATE, (0,), (STATE,), UNIT, 256)
TWO_PAGES = CacheGroup(CacheKind.STATE, (1, 2), (STATE, STATE), UNIT, 256)


class Ranks:
    """A page of a state holds the tokens that went into it; the next token depends on all of them."""

    def __init__(self, groups: tuple[CacheGroup, ...], pages: int, overlap: int, **config: object) -> None:
        facts = RunnerFacts(groups, pages, max_model_len=64, vocab_size=VOCAB, device="toy", overlap=overlap)
        self.scheduler = Scheduler(SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=24, **config), facts)
        self.count = groups[-1].pages_per_state
        self.held: dict[int, tuple[int, ...]] = {}
        self.last: dict[int, int] = {}
        self.answers: dict[str, dict[int, list[int]]] = {}
        self.computed = 0

    def run(self, requests: list[EngineRequest]) -> None:
        for request in requests:
            self.scheduler.submit(request)
        flying: deque[tuple[StepPlan, StepResult]] = deque()
        for _ in range(2000):
            while (plan := self.scheduler.plan()) is not None:
                flying.append((plan, self.step(plan)))
            if not flying:
                break
            for delta in self.scheduler.commit(*flying.popleft()):
                for part in delta.sequences:
                    self.answers.setdefault(delta.request_id, {}).setdefault(part.index, []).extend(part.token_ids)
        assert not self.scheduler.has_work and self.scheduler.stats().pages_used == 0

    def step(self, plan: StepPlan) -> StepResult:
        if plan.copies is not None:
            self.held |= {int(to): self.held.get(int(of), ()) for of, to in zip(plan.copies.source, plan.copies.target, strict=True)}
        table, ends, found = plan.block_tables[-1], np.cumsum(plan.lengths), []
        written = [set(row[self.count :].tolist()) for row in table]
        assert sum(map(len, written)) == len(set().union(*written)), "two rows write a page"
        for row, (slot, start, length) in enumerate(zip(plan.slots.tolist(), plan.starts.tolist(), plan.lengths.tolist(), strict=True)):
            others = set().union(*(pages for number, pages in enumerate(written) if number != row))
            assert start == 0 or not others & set(table[row, : self.count].tolist()), "a row writes what another reads"
            found.append(self.row(slot, start, plan.token_ids[ends[row] - length : ends[row]].tolist(), table[row]))
        for pages, state in zip((row[self.count :].tolist() for row in table), found, strict=True):
            self.held |= dict.fromkeys(pages, state)
        self.computed += int(plan.lengths.sum())
        sampled = [
            (slot, sum(i * t for i, t in enumerate(state, 1)) % VOCAB) for slot, state in zip(plan.slots.tolist(), found, strict=True)
        ]
        chosen = [pair for pair, wanted in zip(sampled, plan.sampled.tolist(), strict=True) if wanted]
        self.last |= dict(chosen)
        tokens = np.array([[token] for _, token in chosen], np.int32).reshape(-1, 1)
        return StepResult(plan.step, tokens, np.ones(len(chosen), np.int32))

    def row(self, slot: int, start: int, tokens: list[int], table: np.ndarray) -> tuple[int, ...]:
        before = [self.held[page] for page in table[: self.count].tolist()] if start else [()] * self.count
        assert len(set(before)) == 1 and len(before[0]) == start, "another state than that of the tokens before"
        return (*before[0], *(self.last[slot] if token < 0 else token for token in tokens))


def follow(tokens: Sequence[int]) -> int:
    return sum(place * token for place, token in enumerate(tokens, 1)) % VOCAB


def ask(name: str, prompt: list[int], tokens: int, n: int = 1) -> EngineRequest:
    return EngineRequest(name, tuple(prompt), SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, n=n))


def expected(request: EngineRequest) -> list[int]:
    text = list(request.prompt)
    for _ in range(request.params.max_tokens or 0):
        text.append(follow(text))
    return text[len(request.prompt) :]


PROMPTS = st.tuples(st.integers(1, 30), st.integers(0, 3), st.integers(1, 12), st.integers(1, 3))


@settings(deadline=None, max_examples=60)
@given(st.lists(PROMPTS, min_size=1, max_size=8), st.sampled_from([22, 60]), st.sampled_from([1, 2, 3]), st.booleans(), st.booleans())
def test_every_step_reads_the_state_of_the_tokens_before_it(
    asked: list[tuple[int, int, int, int]], pages: int, overlap: int, hybrid: bool, caching: bool
) -> None:
    ranks = Ranks((TOKENS, TWO_PAGES) if hybrid else (ALONE,), pages, overlap, enable_prefix_caching=caching)
    requests = [ask(f"r{i}", [*range(1, shared + 1), 40 + own], tokens, n) for i, (shared, own, tokens, n) in enumerate(asked)]
    ranks.run(requests)
    for request in requests:
        assert ranks.answers[request.request_id] == dict.fromkeys(range(request.params.n), expected(request))


def test_a_prompt_goes_on_where_an_earlier_one_ended_and_where_prompts_part() -> None:
    ranks = Ranks((TOKENS, TWO_PAGES), 100, 2)
    shared = list(range(1, 18))
    ranks.run([ask("first", [*shared, 30, 31], 3)])
    ranks.run([ask("longer", [*shared, 30, 31, 32], 1)])
    assert ranks.scheduler.stats().prefix_hits == 16
    ranks = Ranks((ALONE,), 100, 2)
    for number in range(3):
        ranks.run([ask(f"other {number}", [*shared, *range(20 + 9 * number, 29 + 9 * number)], 1)])
    # The second shows where they part, and leaves a state there for the third.
    assert ranks.scheduler.stats().prefix_hits == 16


def test_siblings_begin_with_a_copy_of_the_state_before_the_last_token() -> None:
    ranks = Ranks((TOKENS, TWO_PAGES), 100, 2, enable_prefix_caching=False)
    ranks.run([ask("n", list(range(1, 20)), 4, n=3)])
    assert ranks.computed == 19 + 3 + 2 * (1 + 3), "a sibling computes the prompt's last token and its own answer"
