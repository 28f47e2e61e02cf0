"""Cache groups: how layers are cut into groups of one page size, and which pages each kind still needs."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from pagoda.hal.errors import ModelError
from pagoda.hal.kv import CacheKind, LayerCache, StatePart, place_states
from pagoda.serving.engine.blocks import BlockPool
from pagoda.serving.engine.groups import GroupRule, hash_unit, resolve_groups
from pagoda.serving.engine.prefix import PrefixIndex, chain_root


def full(heads=2, dim=64):
    return LayerCache(CacheKind.FULL, heads, dim, dim, "bfloat16")


def sliding(window=512, heads=2, dim=64):
    return LayerCache(CacheKind.SLIDING, heads, dim, dim, "bfloat16", window)


def test_a_plain_model_is_one_group_of_the_preferred_page():
    grouping = resolve_groups([full()] * 30, (32, 16))
    assert [(g.layers, g.tokens_per_page) for g in grouping.groups] == [(tuple(range(30)), 32)]
    assert grouping.padding == 0 and grouping.groups[0].page_bytes == 30 * 512 * 32


def test_alternating_layers_are_two_groups_without_padding():
    grouping = resolve_groups([sliding(), full()] * 13, (16,))
    assert [g.kind for g in grouping.groups] == [CacheKind.SLIDING, CacheKind.FULL]
    assert grouping.groups[0].layers == tuple(range(0, 26, 2)) and grouping.padding == 0


@pytest.mark.parametrize(("layers", "groups", "padding"), [(48, 6, 0.0), (26, 7, 2 / 28), (34, 7, 1 / 35), (62, 6, 4 / 66)])
def test_five_sliding_layers_to_one_full(layers, groups, padding):
    caches = [full() if i % 6 == 5 else sliding() for i in range(layers)]
    grouping = resolve_groups(caches, (16,))
    assert len(grouping.groups) == groups
    assert grouping.padding == pytest.approx(padding)


def test_larger_heads_get_fewer_tokens_a_page():
    caches = [sliding(heads=4, dim=256) if i % 2 else full(heads=2, dim=256) for i in range(12)]
    grouping = resolve_groups(caches, (16, 32))
    assert {(g.kind, g.tokens_per_page) for g in grouping.groups} == {(CacheKind.SLIDING, 16), (CacheKind.FULL, 32)}
    assert grouping.padding == 0
    assert hash_unit([GroupRule.of(g) for g in grouping.groups]) == 32


def state(numbers):
    return LayerCache.of_state(StatePart((numbers, 3), "bfloat16"), StatePart((numbers, 16), "float32"))


def test_states_take_pages_of_the_same_size_several_where_one_is_too_small():
    caches = [full() if i % 4 == 3 else state(256) for i in range(8)]
    grouping = resolve_groups(caches, (16, 32))
    tokens, states = grouping.groups
    assert (tokens.layers, states.layers) == ((3, 7), (0, 1, 2, 4, 5, 6)) and states.kind is CacheKind.STATE
    assert tokens.page_bytes == states.page_bytes >= caches[0].state_bytes and states.tokens_per_page == tokens.tokens_per_page
    places = place_states(states)
    assert states.pages_per_state == places[-1][0] + 1 == -(-6 // (states.page_bytes // caches[0].state_bytes))
    ends = [(page, offset + caches[0].state_bytes) for page, offset in places]
    assert all(end <= states.page_bytes for _, end in ends) and len(set(places)) == 6
    assert grouping.padding == pytest.approx(
        1 - (tokens.used_bytes + 6 * caches[0].state_bytes) / (1 + states.pages_per_state) / states.page_bytes
    )


def test_a_model_of_states_alone_has_one_page_for_each():
    (group,) = resolve_groups([state(64), None, state(64)], (16, 32)).groups
    assert (group.layers, group.pages_per_state, group.page_bytes, group.table_width(1000)) == ((0, 2), 1, 2 * state(64).state_bytes, 2)


def test_layers_without_a_cache_are_left_out():
    grouping = resolve_groups([full(), None, full()], (16,))
    assert grouping.groups[0].layers == (0, 2)
    with pytest.raises(ModelError, match="at least one of each"):
        resolve_groups([None], (16,))


def test_many_geometries_share_a_group_where_groups_are_few():
    caches = [full(heads=1 + i % 10) for i in range(20)]
    grouping = resolve_groups(caches, (16,))
    assert len(grouping.groups) == 1 and grouping.groups[0].layers == tuple(range(20)) and grouping.padding == 0
    mixed = resolve_groups([full(heads=1 + i % 10) if i % 2 else sliding(heads=1 + i % 9) for i in range(40)], (16,))
    assert len(mixed.groups) <= 8 and {g.kind for g in mixed.groups} == {CacheKind.FULL, CacheKind.SLIDING}
    with pytest.raises(ModelError, match="need 9 cache groups and a step has room for 8"):
        resolve_groups([sliding(window=w) for w in range(1, 10)], (16,))


CACHES = st.builds(
    lambda kind, heads, dim: LayerCache(kind, heads, dim, dim, "bfloat16", 64 if kind is not CacheKind.FULL else None),
    st.sampled_from([CacheKind.FULL, CacheKind.SLIDING, CacheKind.CHUNKED]),
    st.sampled_from([1, 2, 8]),
    st.sampled_from([64, 96, 128]),
)


@given(
    st.lists(st.sampled_from([None]) | CACHES, min_size=1, max_size=20).filter(lambda caches: any(caches)),
    st.sampled_from([(16,), (16, 32, 64)]),
)
def test_every_layer_is_in_one_group_that_holds_it(caches, page_sizes):
    grouping = resolve_groups(caches, page_sizes)
    assert sorted(layer for g in grouping.groups for layer in g.layers) == [i for i, cache in enumerate(caches) if cache]
    assert len({g.page_bytes for g in grouping.groups}) == 1
    for g in grouping.groups:
        assert g.caches == tuple(caches[layer] for layer in g.layers)
        assert len({(cache.kind, cache.window) for cache in g.caches}) == 1
        assert g.used_bytes <= g.page_bytes and g.tokens_per_page in page_sizes
        assert (g.kind, g.window) == (g.caches[0].kind, g.caches[0].window)
    assert 0 <= grouping.padding < 1


RULES = st.builds(
    lambda kind, size, window: GroupRule(kind, size, None if kind is CacheKind.FULL else window),
    st.sampled_from([CacheKind.FULL, CacheKind.SLIDING, CacheKind.CHUNKED]),
    st.sampled_from([2, 4, 8]),
    st.integers(1, 20),
)


def sees(rule, query, key):
    if rule.window is None:
        return key <= query
    if rule.kind is CacheKind.CHUNKED:
        return key <= query and key // rule.window == query // rule.window
    return query - rule.window < key <= query


@given(RULES, st.integers(0, 60))
def test_first_visible_is_the_least_key_that_a_query_sees(rule, position):
    first = next(key for key in range(position + 1) if sees(rule, position, key))
    assert rule.first_visible(position) == first
    assert rule.first_visible(np.array([position], np.int32)).tolist() == [first]


@given(st.lists(RULES, min_size=1, max_size=3), st.integers(1, 70), st.integers(0, 70), st.data())
def test_the_longest_prefix_with_all_visible_pages_is_found(rules, known, longest, data):
    """Against the definition: try every length, from the longest down."""
    pool = BlockPool(400)
    index = PrefixIndex(pool, rules)
    tokens, digests = np.arange(known, dtype=np.int32), []
    index.extend(digests, chain_root(None, None), tokens)
    assert len(digests) == known // index.unit
    tables = []
    for rule in rules:
        count = known // rule.tokens_per_page
        held = data.draw(st.lists(st.sampled_from([True, True, True, False]), min_size=count, max_size=count))
        tables.append(np.where(held, pool.allocate(count), 0).astype(np.int32) if count else np.zeros(0, np.int32))
    for unit, one in enumerate(digests):
        index.insert(
            one, [t[unit * index.unit // r.tokens_per_page :][: index.unit // r.tokens_per_page].tolist() for r, t in zip(rules, tables)]
        )

    def usable(length):
        return all(
            table[key // rule.tokens_per_page]
            for rule, table in zip(rules, tables)
            for key in range(length)
            if sees(rule, length, key) or key // rule.tokens_per_page >= rule.first_visible(length) // rule.tokens_per_page
        )

    units = next(n for n in range(min(longest // index.unit, len(digests)), -1, -1) if usable(n * index.unit))
    hit = index.find(digests, longest)
    assert hit.length == units * index.unit
    for rule, table, pages in zip(rules, tables, hit.pages, strict=True):
        first = rule.first_page(hit.length)
        assert len(pages) == hit.length // rule.tokens_per_page
        assert pages.tolist() == [0 if i < first else table[i] for i in range(len(pages))]


def test_chains_differ_by_salt_adapter_and_history():
    roots = {chain_root(None, None), chain_root("s", None), chain_root(None, "s"), chain_root(None, None, ("image",))}
    assert len(roots) == 4
    index = PrefixIndex(BlockPool(4), [GroupRule(CacheKind.FULL, 4, None)])
    chains = []
    for tokens in ([1, 2, 3, 4, 5, 6, 7, 8], [0, 2, 3, 4, 5, 6, 7, 8]):
        chain = []
        index.extend(chain, chain_root(None, None), np.array(tokens, np.int32))
        chains.append(chain)
    assert not set(chains[0]) & set(chains[1])
