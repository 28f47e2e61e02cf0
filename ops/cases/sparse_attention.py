"""Truth and inputs of `choose_keys` and `sparse_attention`: loops over tokens and keys. Numbers of a choice are whole, so that scores are
exact in every dtype and many are equal."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
from pagoda.ops.attention import PagedBatch
from pagoda.ops.cases.attention import attention_case, by_request, facts_of
from pagoda.ops.cases.common import draw, tolerance
from pagoda.ops.op import Case, Op
from pagoda.ops.sparse_attention import ChooseFacts, ChooseKeysReference, SparseAttentionFacts, SparseAttentionReference

_MIXED = [(1, 40), (7, 7), (1, 1), (5, 33), (1, 16), (1, 17), (30, 150)]


def _tokens(batch: PagedBatch) -> Iterator[tuple[int, int, list[int]]]:
    """Each token, its position and the pages of its request."""
    starts = batch.query_start.tolist()
    for row, length in enumerate(batch.seq_lens.tolist()):
        for token in range(starts[row], starts[row + 1]):
            yield token, length - (starts[row + 1] - token), batch.block_table[row].tolist()


def _keys(pages: torch.Tensor, table: list[int], positions: list[int], size: int) -> np.ndarray:
    found: np.ndarray = torch.stack([pages[table[j // size], j % size, 0] for j in positions]).double().numpy()
    return found


def _choose_oracle(case: Case) -> torch.Tensor:
    q, weights, pages, batch = case.args
    facts: ChooseFacts = case.facts
    out = np.full((q.shape[0], facts.top_k), np.nan)
    for token, position, table in _tokens(batch):
        keys = _keys(pages, table, list(range(position + 1)), facts.page_size)
        scores = [
            sum(float(weights[token, head]) * max(float(key @ q[token, head].double().numpy()), 0.0) for head in range(facts.heads))
            for key in keys
        ]
        best = sorted(range(position + 1), key=lambda j: (-scores[j], j))[: facts.top_k]
        out[token] = sorted(best) + [-1] * (facts.top_k - len(best))
    return torch.from_numpy(out)


def _choose_cases(gen: torch.Generator, dtype: str) -> Iterator[Case]:
    for label, segments, heads, dim, top_k, page, padding in (
        ("empty", [], 2, 8, 4, 16, 0), ("one token", [(1, 1)], 2, 8, 4, 16, 0), ("mixed", _MIXED, 4, 16, 12, 16, 0),
        ("padded", _MIXED, 4, 16, 12, 16, 3), ("one key", _MIXED, 1, 8, 1, 8, 0), ("more than there are", _MIXED, 2, 8, 256, 16, 0),
        ("long", [(1, 700), (3, 300)], 8, 32, 64, 64, 0), ("longer", [(1, 5000)], 2, 8, 70, 64, 0),
    ):  # fmt: skip
        base = attention_case(gen, facts_of(dtype, (heads, 1), dim, page), label, segments, padding, rows=bool(padding))
        q, pages, _, batch = base.args[:4]
        weights = draw(gen, q.shape[0], heads, scale=2.0).round().to(q.dtype)
        facts = ChooseFacts(dtype, dtype, heads, dim, page, top_k)
        yield Case(label, facts, (q.round(), weights, pages.round(), batch))


def _sparse_oracle(case: Case) -> torch.Tensor:
    q, pages, chosen, batch = case.args
    facts: SparseAttentionFacts = case.facts
    out = np.full((q.shape[0], facts.num_heads, facts.v_dim), np.nan)
    for token, _, table in _tokens(batch):
        seen = [j for j in chosen[token].tolist() if j >= 0]
        keys = _keys(pages, table, seen, facts.page_size)
        for head in range(facts.num_heads):
            logits = keys @ q[token, head].double().numpy() * facts.scale
            weights = np.exp(logits - logits.max())
            out[token, head] = weights / weights.sum() @ keys[:, : facts.v_dim]
    return torch.from_numpy(out)


def _sparse_cases(gen: torch.Generator, dtype: str) -> Iterator[Case]:
    for label, segments, heads, dim, v_dim, top_k, page, padding in (
        ("empty", [], 2, 24, 16, 4, 16, 0), ("one token", [(1, 1)], 2, 24, 16, 4, 16, 0), ("mixed", _MIXED, 4, 40, 32, 12, 16, 0),
        ("padded", _MIXED, 4, 40, 32, 12, 16, 3), ("one key", _MIXED, 3, 24, 16, 1, 8, 0),
        ("long", [(1, 700), (3, 300)], 16, 96, 64, 64, 64, 0),
    ):  # fmt: skip
        latent = facts_of(dtype, (heads, 1), dim, page, v_dim=v_dim, latent=True)
        base = attention_case(gen, latent, label, segments, padding, rows=bool(padding))
        q, pages, _, batch = base.args[:4]
        chosen = torch.full((q.shape[0], top_k), -1, dtype=torch.int32)
        for token, position, _ in _tokens(batch):
            some = torch.randperm(position + 1, generator=gen)[:top_k].sort().values
            chosen[token, : len(some)] = some
        yield Case(label, SparseAttentionFacts(dtype, dtype, heads, dim, v_dim, page, dim**-0.5, top_k), (q, pages, chosen, batch))


def _sparse_tolerance(case: Case) -> float:
    q, pages = case.args[:2]
    largest = float(q.double().abs().max() * pages.double().nan_to_num().abs().max()) if q.numel() else 0.0
    return tolerance(case.facts.dtype, case.facts.top_k, roundings=2, gain=largest * case.facts.head_dim**0.5 * case.facts.scale)


CHOOSE_KEYS = Op("choose_keys", ChooseKeysReference, _choose_oracle, lambda case: 0.0, _choose_cases, partial(by_request, by_token=(0, 1)))
SPARSE_ATTENTION = Op(
    "sparse_attention", SparseAttentionReference, _sparse_oracle, _sparse_tolerance, _sparse_cases, partial(by_request, by_token=(0, 2))
)
