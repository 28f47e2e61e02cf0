"""The cache connector protocol: the host store by itself, and requests whose prefix comes from it."""

from __future__ import annotations

from concurrent.futures import Future

import pytest
from pagoda.serving.engine.messages import FinishReason
from pagoda.serving.engine.transfer.catalog import HostCatalog
from pagoda.serving.engine.transfer.connector import Loaded, PageJob
from pagoda.serving.engine.transfer.store import StoreConnector
from scheduler_toy import Toy, group, toy_facts, toy_store


class Ranks:
    """Notes what is asked of two ranks; `answer` ends the oldest call."""

    def __init__(self):
        self.calls = []

    def __call__(self, method, *, aside=False, **arguments):
        futures = [Future(), Future()]
        self.calls.append((method, arguments, futures))
        return futures

    def answer(self, *values):
        method, arguments, futures = self.calls.pop(0)
        for future, value in zip(futures, values, strict=True):
            if isinstance(value, Exception):
                future.set_exception(value)
            else:
                future.set_result(value)
        return method, arguments


UNITS = ((b"a", b"b", b"c"), (((1,), (7,)), ((2,), (8,)), ((3,), (9,))))


def stored(places=3):
    ranks, woken = Ranks(), []
    store = StoreConnector(HostCatalog(places), ranks)
    store.wake = lambda: woken.append(1)
    store.save(PageJob(1, *UNITS))
    return store, ranks, woken


def test_the_store_keeps_the_newest_units_and_says_what_it_loaded():
    store, ranks, woken = stored(2)
    assert ranks.answer(None, None) == ("save", {"keys": [0, 1, 0], "pages": [[1, 7], [2, 8], [3, 9]]})
    assert store.match([b"b", b"c", b"d"], 0) == 2
    assert store.match([b"a", b"b"], 0) == 0 and store.match([b"a", b"b"], 1) == 2
    store.load(PageJob(7, (b"b", b"c", b"d"), (((5,),), ((6,),), ((8,),))))
    assert ranks.answer(2, 2) == ("fetch", {"keys": [1, 0]})
    assert list(store.done()) == [] and not woken
    assert ranks.answer(None, None) == ("place", {"keys": [1, 0], "pages": [[5], [6]]})
    assert woken and list(store.done()) == [Loaded(7, 2)] and list(store.done()) == []
    store.save(PageJob(8, (b"a",), (((4,),),)))
    assert ranks.answer(None, None)[1]["keys"] == [1], "b, the oldest, has made room for a"


@pytest.mark.parametrize(
    ("fetched", "placed", "units"),
    [((3, 1), (None, None), 1), ((0, 3), None, 0), ((OSError(), 3), None, 0), ((3, 3), (None, OSError()), 0)],
)
def test_what_one_rank_has_not_is_computed_again(fetched, placed, units):
    store, ranks, woken = stored()
    ranks.answer(None, None)
    store.load(PageJob(7, *UNITS))
    ranks.answer(*fetched)
    if placed is not None:
        assert len(ranks.answer(*placed)[1]["keys"]) == (units or 3)
    assert not ranks.calls and woken
    assert list(store.done()) == [Loaded(7, units)]


def test_units_that_are_being_loaded_keep_their_places():
    store, ranks, _ = stored(3)
    ranks.answer(None, None)
    store.load(PageJob(7, *UNITS))
    store.save(PageJob(2, (b"d",), (((4,), (6,)),)))
    assert [method for method, *_ in ranks.calls] == ["fetch"]
    ranks.answer(3, 3)
    ranks.answer(None, None)
    assert list(store.done()) == [Loaded(7, 3)]
    store.save(PageJob(2, (b"d",), (((4,), (6,)),)))
    assert ranks.answer(None, None)[1]["keys"] == [0]


class Late(StoreConnector):
    """Ends loads when told to, with as many units as told."""

    open, units = False, None

    def done(self):
        for one in super().done() if self.open else ():
            yield Loaded(one.key, one.units if self.units is None else self.units)


def toy_with_history(**facts):
    """A pool that another request has swept, so that only the store knows the first one's pages."""
    toy = Toy(toy_facts(**{"num_pages": 14, **facts}), lambda read, write: toy_store(100, read, write, Late))
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
