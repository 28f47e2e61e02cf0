"""The cache connector protocol: the host store by itself, and requests whose prefix comes from it."""

from __future__ import annotations

import pytest
from pagoda.serving.engine.messages import FinishReason
from pagoda.serving.engine.transfer.connector import Loaded, PageJob
from pagoda.serving.engine.transfer.host_store import HostStore
from scheduler_toy import Toy, group, toy_facts


def test_the_store_keeps_the_newest_units_and_says_what_it_loaded():
    written = {}
    store = HostStore(2, lambda pages: f"bytes of {pages[0][0]}", lambda pages, kept: written.update({pages[0][0]: kept}))
    store.save(PageJob(1, (b"a", b"b", b"c"), (((1,),), ((2,),), ((3,),))))
    assert store.match([b"b", b"c", b"d"], 0) == 2
    assert store.match([b"a", b"b"], 0) == 0 and store.match([b"a", b"b"], 1) == 2
    store.load(PageJob(7, (b"b", b"c", b"d"), (((5,),), ((6,),), ((8,),))))
    assert list(store.done()) == [Loaded(7, 2)] and list(store.done()) == []
    assert written == {5: "bytes of 2", 6: "bytes of 3"}


class Late(HostStore):
    """Ends loads when told to, with as many units as told."""

    open, units = False, None

    def done(self):
        for one in super().done() if self.open else ():
            yield Loaded(one.key, one.units if self.units is None else self.units)


def toy_with_history(**facts):
    """A pool that another request has swept, so that only the store knows the first one's pages."""
    toy = Toy(toy_facts(**{"num_pages": 14, **facts}), lambda read, write: Late(100, read, write))
    toy.submit("first", range(20), max_tokens=2, ignore_eos=True)
    toy.drain()
    toy.submit("sweep", range(25, 45), max_tokens=32, ignore_eos=True)
    toy.drain()
    toy.submit("again", range(20), max_tokens=6, ignore_eos=True)
    toy.submit("other", range(3), max_tokens=6, ignore_eos=True)
    return toy


@pytest.mark.parametrize(("units", "cached"), [(None, 16), (2, 8), (0, 0)])
def test_a_prefix_comes_from_the_store_while_others_run(units, cached):
    toy = toy_with_history()
    toy.store.units = units
    for _ in range(6):
        toy.step()
    assert toy.tokens["again"] == {} and len(toy.tokens["other"][0]) == 6
    assert toy.plan() is None and toy.scheduler.has_work
    toy.store.open = True
    toy.drain()
    assert toy.deltas["again"][0].cached_tokens == cached
    toy.check_tokens("again")
    toy.check_tokens("other")


def test_a_request_that_ends_while_it_loads_keeps_its_pages_until_the_load_ends():
    toy = toy_with_history()
    toy.step()
    used = toy.scheduler.stats().pages_used
    toy.hear(toy.scheduler.abort(["again"]))
    assert toy.reasons["again"][0] is FinishReason.ABORT
    assert toy.scheduler.stats().pages_used == used
    toy.store.open = True
    toy.drain()
    assert not toy.scheduler.has_work


def test_several_groups_load_together():
    groups = (group(4), group(2, layers=(1,)))
    toy = toy_with_history(groups=groups, num_pages=40)
    toy.store.open = True
    toy.drain()
    toy.check_tokens("again")
    assert toy.deltas["again"][0].cached_tokens == 16
