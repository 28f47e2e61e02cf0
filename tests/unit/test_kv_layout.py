"""KV pages on the host: views, copies, and the neutral form between devices."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pagoda.hal.discovery import find
from pagoda.hal.errors import ConfigError
from pagoda.hal.kv import CacheGroup, CacheKind, KVLayout, LayerCache, StatePart


def layout(device: str, caches: list[LayerCache], tokens: int = 16, page_bytes: int = 0) -> KVLayout:
    group = CacheGroup(caches[0].kind, tuple(range(len(caches))), tuple(caches), tokens, page_bytes)
    return find(device).open().kv_layout(group)


def full(heads: int = 2, k_dim: int = 8, v_dim: int = 8, dtype: str = "float32") -> LayerCache:
    return LayerCache(CacheKind.FULL, heads, k_dim, v_dim, dtype)


CACHES = st.builds(full, st.integers(1, 3), st.integers(1, 9), st.integers(0, 9), st.sampled_from(["float32", "bfloat16"]))


@settings(deadline=None, max_examples=30)
@given(st.lists(CACHES, min_size=1, max_size=4), st.sampled_from([1, 4, 16]))
def test_layers_never_share_a_byte(caches: list[LayerCache], tokens: int) -> None:
    pages = layout("cpu", caches, tokens)
    pool, views = pages.allocate(3)
    assert pages.page_bytes % 64 == 0 and pool.shape == (3, pages.page_bytes)
    for number, view in enumerate(views):
        view.k[1:].fill_(number + 1)
        view.v[1:].fill_(-number - 1)
    for number, (view, cache) in enumerate(zip(views, caches, strict=True)):
        assert view.k.shape == (3, tokens, cache.heads, cache.k_dim) and view.v.shape == (3, tokens, cache.heads, cache.v_dim)
        assert (view.k[1:] == number + 1).all() and (view.v[1:] == -number - 1).all()
    assert (pool[0] == 0).all(), "page 0 is zero and nobody else wrote there"


def test_heads_lie_apart_so_that_a_head_is_one_run() -> None:
    _, views = layout("cpu", [full(heads=3, k_dim=8)]).allocate(2)
    assert views[0].k[0, :, 1].is_contiguous()


def test_pages_are_copied_whole() -> None:
    pages = layout("cpu", [full(), full()])
    pool, _ = pages.allocate(8)
    pool[1:].random_()
    before = pool.clone()
    pages.copy(pool, torch.tensor([1, 1, 2]), torch.tensor([4, 5, 6]))
    assert torch.equal(pool[4:7], before[[1, 1, 2]]) and torch.equal(pool[[0, 1, 2, 3, 7]], before[[0, 1, 2, 3, 7]])


@pytest.mark.parametrize(("source", "target"), [("cpu", "reference"), ("reference", "cpu"), ("cpu", "cpu")])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
def test_exported_pages_load_elsewhere_unchanged(source: str, target: str, dtype: str) -> None:
    caches = [full(3, 8, 4, dtype), full(3, 8, 4, dtype)]
    here, there = layout(source, caches), layout(target, caches, page_bytes=8192)
    pool, views = here.allocate(6)
    for view in views:
        view.k.copy_(torch.randn(view.k.shape))
        view.v.copy_(torch.randn(view.v.shape))
    form = here.export(pool, torch.tensor([5, 2]))
    assert form.k.shape == (2, 2, 16, 3, 8) and form.v.shape == (2, 2, 16, 3, 4) and form.k.is_contiguous()
    other, twins = there.allocate(9)
    there.load(other, torch.tensor([7, 1]), form)
    for view, twin in zip(views, twins, strict=True):
        assert torch.equal(view.k.view(torch.uint8)[[5, 2]], twin.k.view(torch.uint8)[[7, 1]])
        assert torch.equal(view.v.view(torch.uint8)[[5, 2]], twin.v.view(torch.uint8)[[7, 1]])
    again = there.export(other, torch.tensor([7, 1]))
    assert again.form == form.form and torch.equal(again.k.view(torch.uint8), form.k.view(torch.uint8))


def test_a_header_that_does_not_fit_is_refused() -> None:
    pages = layout("cpu", [full()])
    pool, _ = pages.allocate(3)
    other = layout("cpu", [full(k_dim=16)])
    form = other.export(other.allocate(3)[0], torch.tensor([1]))
    with pytest.raises(ConfigError, match="do not fit"):
        pages.load(pool, torch.tensor([1]), form)
    fits = pages.export(pool, torch.tensor([1, 2]))
    with pytest.raises(ConfigError, match="2 exported pages were given for 1"):
        pages.load(pool, torch.tensor([1]), fits)


def test_layers_of_different_geometry_have_no_neutral_form() -> None:
    pages = layout("cpu", [full(k_dim=8), full(k_dim=16)])
    with pytest.raises(ConfigError, match="one geometry"):
        pages.export(pages.allocate(2)[0], torch.tensor([1]))


def test_page_bytes_that_do_not_suit_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least 2048 bytes and a multiple of 64"):
        layout("cpu", [full()], page_bytes=1024)
    pages = layout("cpu", [full()], page_bytes=4096)
    with pytest.raises(ConfigError, match="the pool is"):
        pages.allocate(3, torch.zeros(3, 2048, dtype=torch.uint8))


def test_groups_share_one_pool() -> None:
    page_bytes = 4096
    one, two = layout("cpu", [full()], page_bytes=page_bytes), layout("cpu", [full(dtype="bfloat16")] * 4, page_bytes=page_bytes)
    pool, first = one.allocate(4)
    same, second = two.allocate(4, pool)
    assert same is pool
    first[0].k[1].fill_(1)
    second[0].k[2].fill_(2)
    assert (first[0].k[1] == 1).all() and (second[0].k[2] == 2).all()


def test_the_parts_of_recurrent_states_lie_apart_in_their_pages() -> None:
    state = LayerCache.of_state(StatePart((10, 3), "bfloat16"), StatePart((4, 25), "float32"))
    pages = layout("cpu", [state, state], tokens=1)
    pool, views = pages.allocate(2)
    assert [tuple(part.shape) for part in views[0].parts] == [(2, 10, 3), (2, 4, 25)] and views[1].page == 0
    for number, part in enumerate(part for view in views for part in view.parts):
        part[1].fill_(number + 1)
    assert [int(part[1].float().mean()) for view in views for part in view.parts] == [1, 2, 3, 4]
    assert pool.shape[1] == 2 * state.state_bytes == 2 * (64 + 448) and not pool[0].any()
