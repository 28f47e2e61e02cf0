"""Truth and inputs of `segment_attention`: plain loops over tokens and heads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch
from pagoda.ops.cases.common import draw, strided, tolerance
from pagoda.ops.op import Case, Op, Part
from pagoda.ops.segment_attention import SegmentAttentionFacts, SegmentAttentionReference, Segments


def _segments(lengths: tuple[int, ...], known: bool = True) -> Segments:
    bounds = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return Segments(torch.from_numpy(bounds.copy()), bounds if known else None)


def _oracle(case: Case) -> torch.Tensor:
    facts, (q, k, v, segments, bias) = case.facts, case.args
    q, k, v = (t.double().numpy() for t in (q, k, v))
    out, group = np.full(q.shape, np.nan), facts.num_heads // facts.num_kv_heads
    starts = segments.start.tolist()
    for first, stop in pairwise(starts):
        for i in range(first, stop):
            keys = [j for j in range(first, stop) if facts.window is None or abs(i - j) <= facts.window]
            for head in range(facts.num_heads):
                logits = np.array([q[i, head] @ k[j, head // group] for j in keys]) * facts.scale
                if bias is not None:
                    logits = logits + bias[head].double().numpy()[np.array(keys) - i + bias.shape[1] // 2]
                weights = np.exp(logits - logits.max())
                out[i, head] = weights / weights.sum() @ v[keys, head // group]
    return torch.from_numpy(out)


def _tolerance(case: Case) -> float:
    return tolerance(case.facts.dtype, case.facts.head_dim, roundings=3, gain=2.0)


def _case(gen: torch.Generator, label: str, facts: SegmentAttentionFacts, lengths: tuple[int, ...], known: bool = True) -> Case:
    tokens, dim = sum(lengths), facts.head_dim
    q = strided(draw(gen, tokens, facts.num_heads, dim, dtype=facts.dtype))
    k, v = (draw(gen, tokens, facts.num_kv_heads, dim, dtype=facts.dtype) for _ in range(2))
    longest = max(lengths, default=1)
    bias = draw(gen, facts.num_heads, 2 * longest + 1) if facts.bias else None
    return Case(label, facts, (q, k, v, _segments(lengths, known), bias))


def _cases(gen: torch.Generator, dtype: str) -> Iterator[Case]:
    base = SegmentAttentionFacts(dtype, 4, 2, 32, 32**-0.5)
    ragged = (1, 17, 5, 40)
    yield _case(gen, "empty", base, ())
    yield _case(gen, "one token", base, (1,))
    yield _case(gen, "ragged", base, ragged)
    yield _case(gen, "ends only on the device", base, ragged, known=False)
    yield _case(gen, "a segment without tokens", base, (3, 0, 4))
    yield _case(gen, "as many keys as heads, odd size", replace(base, num_kv_heads=4, head_dim=24, scale=0.3), (9, 33))
    yield _case(gen, "window", replace(base, window=4), ragged)
    yield _case(gen, "window as wide as a segment", replace(base, window=16), (17, 18))
    yield _case(gen, "a narrow window in a long segment", replace(base, window=5), (3, 200, 150))
    yield _case(gen, "the same with bias", replace(base, window=3, bias=True), (170,))
    yield _case(gen, "long", replace(base, num_heads=2, num_kv_heads=1), (150, 2, 131))
    for dim in (16, 64, 72, 80, 96, 128):
        yield _case(gen, "heads of towers", replace(base, num_heads=2, num_kv_heads=2, head_dim=dim, scale=dim**-0.5), (33, 70))
    yield _case(gen, "bias", replace(base, bias=True), ragged)
    yield _case(gen, "bias in a window", replace(base, bias=True, window=3), ragged)


def _split(case: Case) -> Iterator[Part]:
    """Each segment in a batch of its own."""
    q, k, v, segments, bias = case.args
    starts = segments.start.tolist()
    for row, (first, stop) in enumerate(pairwise(starts)):
        if first < stop:
            piece = slice(first, stop)
            args = (q[piece], k[piece], v[piece], _segments((stop - first,)), bias)
            yield Part(replace(case, label=f"{case.label}, segment {row} alone", args=args), piece)


SEGMENT_ATTENTION = Op("segment_attention", SegmentAttentionReference, _oracle, _tolerance, _cases, _split)
