"""Truth and inputs of the recurrences: `causal_conv1d`, `selective_scan`, `ssd_scan`, `gated_delta_rule`; plain loops over tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from pagoda.ops.cases.common import draw, tolerance
from pagoda.ops.conv import CausalConvReference, ConvFacts
from pagoda.ops.delta import DeltaFacts, GatedDeltaReference
from pagoda.ops.op import Case, Op
from pagoda.ops.scan import SelectiveScanFacts, SelectiveScanReference, SsdFacts, SsdScanReference
from pagoda.ops.state import StateBatch

Array = np.ndarray[Any, Any]
Walk = Callable[[Array, slice], tuple[Array, Array]]
"""`(a request's state, its tokens) → (outputs, state)`."""


class Rows(NamedTuple):
    """Requests of a case: query tokens of each, which of them begin, padding tokens after the last."""

    label: str
    lengths: tuple[int, ...]
    fresh: tuple[bool, ...]
    padding: int = 0


SHAPES = (
    Rows("no request", (), ()),
    Rows("one token", (1,), (False,)),
    Rows("a prompt begins", (33,), (True,)),
    Rows("a prompt goes on", (17,), (False,)),
    Rows("decodes", (1, 1, 1), (False, True, False)),
    Rows("ragged", (65, 3, 16, 1, 1), (True, False, False, False, True), 4),
    Rows("padding rows", (5, 1, 0), (False, False, True), 2),
)
REAL = Rows("sizes of models", (200, 70, 9, 1), (True, False, False, False), 3)
"""With heads and channels as models have them: compilers make other programs of those. Tokens on both sides of 64, 128 and 192."""
DECODES = Rows("decodes, sizes of models", (1,) * 33, (False, True, False) * 11, 1)


def uses(small: Iterable[Any], real: Iterable[Any]) -> Iterator[tuple[Any, Rows]]:
    """Facts of small sizes with requests of every kind, and of models' sizes with some."""
    yield from ((facts, rows) for facts in small for rows in SHAPES)
    yield from ((facts, REAL) for facts in real)


def batch_of(rows: Rows) -> tuple[StateBatch, int]:
    """A step of these rows, and its tokens with padding."""
    count = len(rows.lengths)
    start = torch.tensor([0, *np.cumsum(rows.lengths)], dtype=torch.int32)
    read = torch.tensor([2 * r + 1 for r in range(count)])
    # Every second request's state moves to another page; padding rows use page 0.
    write = torch.tensor([2 * r + 1 + r % 2 for r in range(count)])
    empty = torch.tensor(rows.lengths) == 0
    read, write = (pages.masked_fill(empty, 0) if count else pages.long() for pages in (read, write))
    many = max((r + 1 for r, length in enumerate(rows.lengths) if length > 1), default=0)
    tokens = sum(rows.lengths) + rows.padding
    batch = StateBatch(start, torch.tensor(rows.fresh, dtype=torch.bool), read, write, many, max(rows.lengths, default=0))
    return batch, tokens


def pages_of(gen: torch.Generator, rows: Rows, batch: StateBatch, dtype: str, *shape: int, gap: int = 8) -> torch.Tensor:
    """Pages with NaN wherever no request may look, `shape` numbers each, `gap` further apart than they are long."""
    pages = torch.full((2 * len(rows.lengths) + 2, *shape[:-1], shape[-1] + gap), float("nan"), dtype=getattr(torch, dtype))
    pages = pages[..., : shape[-1]]
    for page, fresh in zip(batch.read.tolist(), rows.fresh, strict=True):
        if not fresh:
            pages[page] = draw(gen, *shape, dtype=dtype, scale=0.5)
    return pages


def walk_of(batch: StateBatch, pages: torch.Tensor, out: Array, walk: Walk) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs, NaN for padding tokens, and pages after the step."""
    after = pages.double().clone()
    out[:] = np.nan
    bounds = batch.query_start.tolist()
    for row, (first, last) in enumerate(pairwise(bounds)):
        read, write = int(batch.read[row]), int(batch.write[row])
        if last == first:
            after[write] = float("nan")
            continue
        state = np.zeros(pages.shape[1:]) if batch.fresh[row] else pages[read].double().numpy().copy()
        out[first:last], state = walk(state, slice(first, last))
        after[write] = torch.from_numpy(state)
    return torch.from_numpy(out), after


def numbers(case: Case, count: int) -> list[Array]:
    """The first `count` arguments in float64."""
    return [arg.double().numpy() for arg in case.args[:count]]


def _conv_oracle(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    facts, (x, pages, batch) = case.facts, case.args
    inputs, weight = x.double().numpy(), case.weights["weight"].double().numpy()
    bias = case.weights["bias"].double().numpy() if facts.bias else 0.0

    def walk(state: Array, tokens: slice) -> tuple[Array, Array]:
        seen = np.concatenate([state.T, inputs[tokens]])
        sums = np.stack([(seen[i : i + facts.taps].T * weight).sum(1) + bias for i in range(tokens.stop - tokens.start)])
        return sums / (1 + np.exp(-sums)) if facts.activation == "silu" else sums, seen[len(seen) - facts.taps + 1 :].T

    return walk_of(batch, pages, np.zeros(inputs.shape), walk)


def _conv_cases(gen: torch.Generator, dtype: str) -> Iterator[Case]:
    small = (ConvFacts(dtype, 24, 4), ConvFacts(dtype, 40, 3, bias=True, activation="none"), ConvFacts(dtype, 8, 2, bias=True))
    real = (ConvFacts(dtype, 1104, 4, bias=True), ConvFacts(dtype, 256, 3, activation="none"))
    for facts, rows in (*uses(small, real), *((facts, DECODES) for facts in real)):
        batch, tokens = batch_of(rows)
        weights = {"weight": draw(gen, facts.channels, facts.taps, dtype=dtype)}
        if facts.bias:
            weights["bias"] = draw(gen, facts.channels, dtype=dtype)
        if facts in real:  # a tap's channels side by side, as models keep them
            pages = pages_of(gen, rows, batch, dtype, facts.taps - 1, facts.channels, gap=0).transpose(1, 2)
        else:
            pages = pages_of(gen, rows, batch, dtype, facts.channels, facts.taps - 1)
        yield Case(rows.label, facts, (draw(gen, tokens, facts.channels, dtype=dtype), pages, batch), weights, mutates=(1,))


def _selective_oracle(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    x, dt, a, b, c, d = numbers(case, 6)

    def walk(state: Array, tokens: slice) -> tuple[Array, Array]:
        outputs = []
        for t in range(tokens.start, tokens.stop):
            state = np.exp(dt[t][:, None] * a) * state + (dt[t] * x[t])[:, None] * b[t]
            outputs.append(state @ c[t] + d * x[t])
        return np.stack(outputs), state

    return walk_of(case.args[7], case.args[6], np.zeros(x.shape), walk)


def _selective_cases(gen: torch.Generator, dtype: str) -> Iterator[Case]:
    small = (SelectiveScanFacts(dtype, 24, 16), SelectiveScanFacts(dtype, 8, 4))
    for facts, rows in uses(small, [SelectiveScanFacts(dtype, 320, 16)]):
        batch, tokens = batch_of(rows)
        size, state = facts.channels, facts.state
        args = (
            draw(gen, tokens, size, dtype=dtype), draw(gen, tokens, size).abs(), -draw(gen, size, state).exp(),
            draw(gen, tokens, state, dtype=dtype), draw(gen, tokens, state, dtype=dtype), draw(gen, size),
            pages_of(gen, rows, batch, "float32", size, state), batch,
        )  # fmt: skip
        yield Case(rows.label, facts, args, mutates=(6,))


def _softplus(x: Array) -> Array:
    return np.maximum(x, 0.0) + np.log1p(np.exp(-np.abs(x)))


def _ssd_oracle(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    x, step, bias, a, b, c, d = (np.zeros(0) if arg is None else arg.double().numpy() for arg in case.args[:7])
    dt = np.clip(_softplus(step + bias), *case.facts.limits) if case.args[1] is not None else np.ones(x.shape[:2])
    d = d if case.args[6] is not None else np.zeros(len(a))
    repeat = case.facts.heads // case.facts.groups

    def walk(state: Array, tokens: slice) -> tuple[Array, Array]:
        outputs = []
        for t in range(tokens.start, tokens.stop):
            state = state.copy()
            out = np.zeros(x.shape[1:])
            for h in range(case.facts.heads):
                g = h // repeat
                state[h] = np.exp(dt[t, h] * a[h]) * state[h] + dt[t, h] * np.outer(x[t, h], b[t, g])
                out[h] = state[h] @ c[t, g] + d[h] * x[t, h]
            outputs.append(out)
        return np.stack(outputs), state

    return walk_of(case.args[8], case.args[7], np.zeros(x.shape), walk)


def _ssd_cases(gen: torch.Generator, dtype: str) -> Iterator[Case]:
    small = (SsdFacts(dtype, 4, 16, 2, 8), SsdFacts(dtype, 3, 8, 1, 16, (0.01, 0.9)), SsdFacts(dtype, 2, 16, 2, 16))
    for facts, rows in uses(small, (SsdFacts(dtype, 2, 64, 1, 128), SsdFacts(dtype, 1, 128, 1, 128))):
        batch, tokens = batch_of(rows)
        heads, groups = facts.heads, facts.groups
        # As many groups as heads: linear attention, without steps.
        steps = (draw(gen, tokens, heads, dtype=dtype, scale=3.0), draw(gen, heads)) if groups < heads or heads == 1 else (None, None)
        args = (
            draw(gen, tokens, heads, facts.head_dim, dtype=dtype), *steps, -draw(gen, heads).exp(),
            draw(gen, tokens, groups, facts.state, dtype=dtype), draw(gen, tokens, groups, facts.state, dtype=dtype),
            draw(gen, heads) if groups < heads else None,
            pages_of(gen, rows, batch, "float32", heads, facts.head_dim, facts.state), batch,
        )  # fmt: skip
        yield Case(rows.label, facts, args, mutates=(7,))


def _unit(x: Array) -> Array:
    return x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)


def _delta_oracle(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v, step, beta, bias, rates = numbers(case, 7)
    facts = case.facts
    repeat = facts.heads // facts.k_heads
    q, k = _unit(q) / np.sqrt(facts.k_dim), _unit(k)
    kept = np.exp(_softplus(step + bias) * (rates[:, None] if facts.by_channel else rates))
    amount = (2.0 if facts.double else 1.0) / (1.0 + np.exp(-beta))

    def walk(state: Array, tokens: slice) -> tuple[Array, Array]:
        outputs = []
        for t in range(tokens.start, tokens.stop):
            state, out = state.copy(), np.zeros(v.shape[1:])
            for h in range(facts.heads):
                key, decay = k[t, h // repeat], kept[t, h]
                state[h] = state[h] * (decay[:, None] if facts.by_channel else decay)
                state[h] += amount[t, h] * np.outer(key, v[t, h] - key @ state[h])
                out[h] = q[t, h // repeat] @ state[h]
            outputs.append(out)
        return np.stack(outputs), state

    return walk_of(case.args[8], case.args[7], np.zeros(v.shape), walk)


def _delta_cases(gen: torch.Generator, dtype: str) -> Iterator[Case]:
    small = (DeltaFacts(dtype, 2, 4, 8, 16), DeltaFacts(dtype, 2, 2, 16, 8, by_channel=True), DeltaFacts(dtype, 1, 1, 16, 16, double=True))
    real = (DeltaFacts(dtype, 1, 2, 128, 128), DeltaFacts(dtype, 2, 2, 128, 128, by_channel=True))
    for facts, rows in uses(small, real):
        batch, tokens = batch_of(rows)
        decays = (facts.heads, facts.k_dim) if facts.by_channel else (facts.heads,)
        args = (
            *(draw(gen, tokens, facts.k_heads, facts.k_dim, dtype=dtype) for _ in range(2)),
            draw(gen, tokens, facts.heads, facts.v_dim, dtype=dtype), draw(gen, tokens, *decays, dtype=dtype, scale=2.0),
            draw(gen, tokens, facts.heads, dtype=dtype), draw(gen, *decays), -draw(gen, facts.heads).exp(),
            pages_of(gen, rows, batch, "float32", facts.heads, facts.k_dim, facts.v_dim), batch,
        )  # fmt: skip
        yield Case(rows.label, facts, args, mutates=(7,))
    yield from _delta_extremes(gen, dtype)


def _delta_extremes(gen: torch.Generator, dtype: str) -> Iterator[Case]:
    """Keys that are all alike, decays so strong that none of their products is above 0, and none at all: what loses most when systems
    are solved, and when decays are divided by each other."""
    rows = Rows("alike", (130, 20), (True, False))
    batch, tokens = batch_of(rows)
    for by_channel in (False, True):
        facts = DeltaFacts(dtype, 1, 1, 32, 16, by_channel=by_channel, double=by_channel)
        decays = (1, 32) if by_channel else (1,)
        key = draw(gen, 1, 1, 32, dtype=dtype).expand(tokens, 1, 32) + draw(gen, tokens, 1, 32, dtype=dtype, scale=0.05)
        steps = draw(gen, tokens, *decays, dtype=dtype, scale=4.0)
        steps[::7], steps[1::5] = 60.0, -30.0
        args = (
            draw(gen, tokens, 1, 32, dtype=dtype), key, draw(gen, tokens, 1, 16, dtype=dtype), steps,
            draw(gen, tokens, 1, dtype=dtype, scale=3.0), draw(gen, *decays), torch.tensor([-16.0]),
            pages_of(gen, rows, batch, "float32", 1, 32, 16), batch,
        )  # fmt: skip
        yield Case(rows.label, facts, args, mutates=(7,))


def _recurrent_tolerance(case: Case) -> float:
    # Sums of products of sums; the state amplifies what was lost by as many terms as it holds.
    return tolerance(case.facts.dtype, 4096, roundings=2)


def no_parts(case: Case) -> Iterator[Any]:
    """Nothing packed is addressed by parts."""
    return iter(())


CAUSAL_CONV1D = Op(
    "causal_conv1d", CausalConvReference, _conv_oracle, lambda case: tolerance(case.facts.dtype, 16, roundings=2), _conv_cases, no_parts
)
SELECTIVE_SCAN = Op("selective_scan", SelectiveScanReference, _selective_oracle, _recurrent_tolerance, _selective_cases, no_parts)
SSD_SCAN = Op("ssd_scan", SsdScanReference, _ssd_oracle, _recurrent_tolerance, _ssd_cases, no_parts)
GATED_DELTA_RULE = Op("gated_delta_rule", GatedDeltaReference, _delta_oracle, _recurrent_tolerance, _delta_cases, no_parts)
