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
from pagoda.serving.engine.spec.drafter import Draft, DraftState

UNIT, VOCAB = 4, 50
TOKENS = CacheGroup(CacheKind.FULL, (0,), (LayerCache(CacheKind.FULL, 1, 8, 8, "float32"),), UNIT, 256)
STATE = LayerCache.of_state(StatePart((48,), "float32"))
ALONE = CacheGroup(CacheKind.STATE, (0,), (STATE,), UNIT, 256)
TWO_PAGES = CacheGroup(CacheKind.STATE, (1, 2), (STATE, STATE), UNIT, 256)


class Ranks:
    """A page of a state holds the tokens that went into it; the next token depends on all of them."""

    def __init__(self, groups: tuple[CacheGroup, ...], pages: int, overlap: int, drafter: Guesses | None = None, **config: object) -> None:
        facts = RunnerFacts(groups, pages, max_model_len=64, vocab_size=VOCAB, device="toy", overlap=overlap)
        self.scheduler = Scheduler(SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=24, **config), facts, drafter=drafter)
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
        chosen = [
            (int(plan.slots[row]), accepted(state, [] if plan.drafts is None else [d for d in plan.drafts[row].tolist() if d >= 0]))
            for row, state in enumerate(found)
            if plan.sampled[row]
        ]
        self.last |= {slot: taken[-1] for slot, taken in chosen}
        widest = max((len(taken) for _, taken in chosen), default=1)
        tokens = np.array([taken + [0] * (widest - len(taken)) for _, taken in chosen], np.int32).reshape(-1, widest)
        return StepResult(plan.step, tokens, np.array([len(taken) for _, taken in chosen], np.int32))

    def row(self, slot: int, start: int, tokens: list[int], table: np.ndarray) -> tuple[int, ...]:
        before = [self.held[page] for page in table[: self.count].tolist()] if start else [()] * self.count
        assert len(set(before)) == 1 and len(before[0]) == start, "another state than that of the tokens before"
        return (*before[0], *(self.last[slot] if token < 0 else token for token in tokens))


def follow(tokens: Sequence[int]) -> int:
    return sum(place * token for place, token in enumerate(tokens, 1)) % VOCAB


def accepted(state: tuple[int, ...], drafts: list[int]) -> list[int]:
    """What follows the tokens before the drafts, the last of a state, and each of them that is right."""
    known, taken = state[: len(state) - len(drafts)], list[int]()
    for place in range(len(drafts) + 1):
        taken.append(follow((*known, *drafts[:place])))
        if place < len(drafts) and drafts[place] != taken[-1]:
            break
    return taken


class Guesses:
    """Chains of two, of which as many are right as the length of a text says: none, one or both."""

    branches, wants, caches = False, (), ()

    def propose(self, state: DraftState) -> Draft:
        ids = np.full((len(state.slots), 2), -1, np.int32)
        for row, (known, room) in enumerate(zip(state.tokens, state.room.tolist(), strict=True)):
            text = known.tolist()
            for place in range(min(room, 2)):
                text.append((follow(text) + (place >= len(known) % 3)) % VOCAB)
                ids[row, place] = text[-1]
        return Draft(ids, np.broadcast_to(np.arange(-1, 1, dtype=np.int32), ids.shape))


def ask(name: str, prompt: list[int], tokens: int, n: int = 1) -> EngineRequest:
    return EngineRequest(name, tuple(prompt), SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, n=n))


def expected(request: EngineRequest) -> list[int]:
    text = list(request.prompt)
    for _ in range(request.params.max_tokens or 0):
        text.append(follow(text))
    return text[len(request.prompt) :]


PROMPTS = st.tuples(st.integers(1, 30), st.integers(0, 3), st.integers(1, 12), st.integers(1, 3))


@settings(deadline=None, max_examples=120)
@given(
    st.lists(PROMPTS, min_size=1, max_size=8),
    st.sampled_from([22, 60]),
    st.sampled_from([1, 2, 3]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_every_step_reads_the_state_of_the_tokens_before_it(
    asked: list[tuple[int, int, int, int]], pages: int, overlap: int, hybrid: bool, caching: bool, drafts: bool
) -> None:
    groups, drafter = (TOKENS, TWO_PAGES) if hybrid else (ALONE,), Guesses() if drafts else None
    ranks = Ranks(groups, pages, overlap, drafter, enable_prefix_caching=caching)
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


def test_a_rejected_draft_costs_no_more_than_computing_what_was_accepted_again() -> None:
    ranks, plain = Ranks((TOKENS, TWO_PAGES), 100, 1, Guesses()), Ranks((TOKENS, TWO_PAGES), 100, 1)
    request = ask("a", list(range(1, 12)), 40)
    for each in (ranks, plain):
        each.run([request])
        assert each.answers["a"] == {0: expected(request)}
    counters = ranks.scheduler.stats()
    assert 0 < counters.accepted_tokens < counters.draft_tokens
    steps = counters.draft_tokens // 2 + 1
    assert ranks.computed <= 11 + 39 + counters.draft_tokens + 2 * steps, "steps grow with each rejection"


def test_siblings_begin_with_a_copy_of_the_state_before_the_last_token() -> None:
    ranks = Ranks((TOKENS, TWO_PAGES), 100, 2, enable_prefix_caching=False)
    ranks.run([ask("n", list(range(1, 20)), 4, n=3)])
    assert ranks.computed == 19 + 3 + 2 * (1 + 3), "a sibling computes the prompt's last token and its own answer"
