"""Random lives of requests against simulated pages: the engine invariants 1 to 5, at every overlap depth and cache group mix.

Pages are checked at each read (`scheduler_toy`), books after each commit, tokens against the toy model run alone.
"""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from pagoda.hal.errors import CapacityError, RequestError
from pagoda.hal.kv import CacheKind
from pagoda.serving.engine.messages import FinishReason
from pagoda.serving.engine.spec.drafter import PromptLookup
from pagoda.serving.engine.transfer.connector import Loaded
from pagoda.serving.engine.transfer.store import StoreConnector
from scheduler_toy import Branching, KnowingDrafter, Toy, expected_tokens, group, toy_facts, toy_store

GROUPS = {
    "full": (group(4),),
    "sliding": (group(4), group(4, CacheKind.SLIDING, 6, (1,))),
    "mixed": (group(4), group(2, CacheKind.SLIDING, 5, (1,)), group(2, CacheKind.CHUNKED, 8, (2,))),
}
PROMPTS = st.tuples(st.integers(0, 2), st.integers(0, 22), st.lists(st.integers(0, 49), min_size=1, max_size=6))


class Flaky(StoreConnector):
    """Ends loads some polls later, every third one only in part."""

    polls = 0

    def done(self):
        self.polls += 1
        for one in super().done() if self.polls % 3 == 0 else ():
            yield one if one.key % 3 else Loaded(one.key, one.units // 2)


STORES = {
    "none": None,
    "host": lambda read, write: toy_store(12, read, write),
    "flaky": lambda read, write: toy_store(12, read, write, Flaky),
}

DRAFTERS = {"none": None, "lookup": PromptLookup(3), "knowing": KnowingDrafter(2), "tree": Branching(2)}


class Life(RuleBasedStateMachine):
    @initialize(
        groups=st.sampled_from(sorted(GROUPS)),
        pages=st.integers(24, 60),
        overlap=st.integers(1, 3),
        seqs=st.integers(1, 5),
        budget=st.integers(4, 24),
        threshold=st.sampled_from([0, 0, 3]),
        caching=st.booleans(),
        policy=st.sampled_from(["fcfs", "priority"]),
        store=st.sampled_from(sorted(STORES)),
        adapters=st.integers(1, 2),
        drafter=st.sampled_from(["none", *sorted(DRAFTERS)]),
        burst=st.sampled_from([1, 2, 4]),
        costs=st.sampled_from([None, (1.0, 0.0, 0.0), (1.0, 3.0, 10.0), (0.0, 5.0, 50.0), (2.0, 30.0, 5.0)]),
    )
    def begin(self, groups, pages, overlap, seqs, budget, threshold, caching, policy, store, adapters, drafter, burst, costs):
        facts = toy_facts(GROUPS[groups], num_pages=pages, max_model_len=40, overlap=overlap, adapter_slots=adapters, burst=burst)
        self.toy = Toy(
            facts,
            STORES[store],
            DRAFTERS[drafter],
            costs,
            max_num_seqs=seqs,
            max_num_batched_tokens=budget,
            long_prefill_token_threshold=threshold,
            enable_prefix_caching=caching,
            scheduling_policy=policy,
        )
        self.count, self.forks, self.gone = 0, {}, set()

    @rule(
        prompt=PROMPTS,
        max_tokens=st.integers(1, 16),
        n=st.sampled_from([1, 1, 1, 2, 3]),
        greedy=st.booleans(),
        bound=st.sampled_from([False, False, True]),
        logprobs=st.sampled_from([None, None, 2]),
        prompt_logprobs=st.sampled_from([None, None, None, 1]),
        ignore_eos=st.booleans(),
        min_tokens=st.integers(0, 1),
        priority=st.integers(0, 2),
        adapter=st.sampled_from([None, None, "x", "y", "z"]),
        salt=st.sampled_from([None, None, "s"]),
        beam_width=st.sampled_from([0, 0, 0, 2, 3]),
    )
    def submit(self, prompt, max_tokens, n, greedy, bound, adapter, salt, priority, beam_width, **params):
        family, shared, own = prompt
        name, self.count = f"r{self.count}", self.count + 1
        extra = {"adapter": adapter} if adapter else {}
        words = ((49, 48),) if bound else ()
        stops = () if beam_width else (11, 12, 13)
        try:
            self.toy.submit(
                name,
                [*range(family * 5, family * 5 + shared), *own],
                n=n,
                temperature=0.0 if greedy else 1.0,
                max_tokens=max_tokens,
                bad_words_token_ids=words,
                extra=extra,
                stop_token_ids=stops,
                request={"adapter": adapter, "cache_salt": salt, "priority": priority, "beam_width": beam_width},
                **params,
            )
        except CapacityError as error:
            assert error.asked > error.available == self.toy.facts.num_pages - 1
        except RequestError as error:
            assert beam_width and error.param in ("n", "beam_width")

    @precondition(lambda self: len(self.toy.ranks.in_flight) < self.toy.facts.overlap)
    @rule()
    def plan(self):
        self.toy.plan()

    @precondition(lambda self: self.toy.ranks.in_flight)
    @rule()
    def commit(self):
        self.toy.commit()

    @rule(turns=st.integers(1, 6))
    def run(self, turns):
        for _ in range(turns):
            self.toy.step()

    @precondition(lambda self: self.toy.scheduler.has_work)
    @rule(pick=st.integers(0, 20), how=st.sampled_from(["abort", "fail"]))
    def end(self, pick, how):
        alive = [name for name in self.toy.requests if name not in self.toy.ended]
        if not alive:
            return
        name = alive[pick % len(alive)]
        self.gone.add(name)
        self.toy.hear(self.toy.scheduler.abort([name]) if how == "abort" else self.toy.scheduler.fail("told so", [name]))
        assert name in self.toy.ended

    @precondition(lambda self: self.toy.scheduler.has_work)
    @rule(pick=st.integers(0, 20), token=st.one_of(st.none(), st.integers(20, 40)), at=st.sampled_from([None, None, 0, 1, 3]))
    def fork(self, pick, token, at):
        alive = [name for name in self.toy.requests if name not in self.toy.ended]
        if not alive:
            return
        name = alive[pick % len(alive)]
        parent = pick % max(len(self.toy.tokens[name]), 1)
        begun = list(self.toy.tokens[name].get(parent, []))
        origin = self.forks.get((name, parent), ())
        try:
            index = self.toy.scheduler.fork(name, token, parent, at)
        except RequestError:
            return
        self.forks[name, index] = [*[*origin, *begun][:at], *([] if token is None else [token])]

    @rule()
    def reset(self):
        used = self.toy.scheduler.stats().pages_used
        assert self.toy.scheduler.reset_prefix_cache() == (used == 0)

    @invariant()
    def books(self):
        if hasattr(self, "toy"):
            self.toy.check_books()

    def teardown(self):
        if not hasattr(self, "toy") or self.toy.broken:
            return
        toy = self.toy
        toy.drain()
        stats = toy.scheduler.stats()
        assert (stats.running, stats.waiting, stats.pages_used) == (0, 0, 0)
        for name in toy.requests:
            assert name in toy.ended
            if name not in self.gone:
                toy.check_tokens(name)
        for (name, index), begun in self.forks.items():
            if name not in self.gone:
                tokens, reason = expected_tokens(toy.requests[name], toy.facts.max_model_len, index, begun)
                assert (toy.tokens[name][index], toy.reasons[name][index]) == (tokens, reason)
            else:
                assert toy.reasons[name][index] in FinishReason


SHORT = settings(
    max_examples=25,
    stateful_step_count=40,
    deadline=None,
    report_multiple_bugs=False,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),  # shrinking a life takes minutes; turn it on when one fails
    suppress_health_check=list(HealthCheck),
)


class TestLife(Life.TestCase):
    settings = SHORT


@pytest.mark.heavy
class TestManyLives(Life.TestCase):
    settings = settings(SHORT, max_examples=400, stateful_step_count=60)
