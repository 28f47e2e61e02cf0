"""BlockPool: accounting under random use, eviction order, keys."""

from __future__ import annotations

from collections import Counter

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from pagoda.hal.errors import CapacityError
from pagoda.serving.engine.blocks import BlockPool


def test_page_zero_is_never_given_and_exhaustion_takes_nothing():
    pool = BlockPool(5)
    pages = pool.allocate(3)
    assert 0 not in pages and len(set(pages.tolist())) == 3
    with pytest.raises(CapacityError, match="2 pages asked for, 1 of 4 available") as caught:
        pool.allocate(2)
    assert (caught.value.asked, caught.value.available, pool.available) == (2, 1, 1)
    with pytest.raises(CapacityError, match="at least 2 pages"):
        BlockPool(1)


def test_cached_pages_are_evicted_least_recently_freed_first_and_tails_before_heads():
    pool = BlockPool(5)
    first, second = pool.allocate(2), pool.allocate(2)
    for name, page in zip("abcd", [*first.tolist(), *second.tolist()], strict=True):
        assert pool.insert(name.encode(), page)
    pool.release(second)
    pool.release(first)
    assert (pool.used, pool.cached, pool.available) == (0, 4, 4)
    pool.allocate(1)
    assert [bool(pool.find(name.encode())) for name in "abcd"] == [True, True, True, False]
    pool.allocate(2)
    assert [bool(pool.find(name.encode())) for name in "abcd"] == [True, False, False, False]


def test_a_hit_revives_a_page_and_a_key_has_one_page():
    pool = BlockPool(4)
    pages = pool.allocate(2)
    assert pool.insert(b"k", int(pages[0])) and not pool.insert(b"k", int(pages[1])) and not pool.insert(b"l", int(pages[0]))
    pool.release(pages)
    assert (pool.cached, pool.available) == (1, 3)
    pool.share(pages[:1])
    pool.share(pages[:1])
    assert (pool.cached, pool.available, pool.find(b"k")) == (0, 2, int(pages[0]))
    pool.release(np.array([pages[0], pages[0]], np.int32))
    assert pool.used == 0
    with pytest.raises(AssertionError, match="released more often"):
        pool.release(pages[:1])
    pool.forget()
    assert (pool.find(b"k"), pool.cached, pool.available) == (0, 0, 3)


class PoolLife(RuleBasedStateMachine):
    """Against a model: a multiset of held pages, and keys that were inserted."""

    @initialize(pages=st.integers(2, 12))
    def begin(self, pages):
        self.pool, self.held, self.keys, self.named = BlockPool(pages), Counter(), {}, 0

    @rule(count=st.integers(0, 6))
    def allocate(self, count):
        if count > self.pool.available:
            return
        pages = self.pool.allocate(count).tolist()
        assert len(set(pages)) == count and not any(self.held[page] for page in pages)
        self.held.update(pages)
        self.keys = {key: page for key, page in self.keys.items() if page not in pages}

    @precondition(lambda self: any(self.held.values()))
    @rule(data=st.data())
    def release(self, data):
        pages = data.draw(st.lists(st.sampled_from(sorted(self.held.elements())), max_size=4))
        pages = list((Counter(pages) & self.held).elements())
        self.pool.release(np.array(pages, np.int32))
        self.held -= Counter(pages)

    @precondition(lambda self: any(self.held.values()))
    @rule(data=st.data())
    def insert(self, data):
        page, self.named = data.draw(st.sampled_from(sorted(self.held.elements()))), self.named + 1
        key = b"%d" % self.named
        assert self.pool.insert(key, page) == (page not in self.keys.values())
        if page not in self.keys.values():
            self.keys[key] = page

    @precondition(lambda self: self.keys)
    @rule(data=st.data())
    def share(self, data):
        page = self.pool.find(data.draw(st.sampled_from(sorted(self.keys))))
        self.pool.share(np.array([page], np.int32))
        self.held[page] += 1

    @invariant()
    def books(self):
        if not hasattr(self, "pool"):
            return
        used = sum(1 for count in self.held.values() if count)
        cached = sum(1 for page in self.keys.values() if not self.held[page])
        assert (self.pool.used, self.pool.cached, self.pool.available) == (used, cached, self.pool.num_pages - 1 - used)
        assert {key: self.pool.find(key) for key in self.keys} == self.keys


TestPoolLife = PoolLife.TestCase
TestPoolLife.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
