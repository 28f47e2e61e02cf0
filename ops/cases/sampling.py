"""Truth and inputs of `penalize`, `apply_token_bitmask`, `sample`, `masked_sample` and `top_logprobs`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from pagoda.ops.cases.common import by_rows, draw, dtype_of, strided, tolerance
from pagoda.ops.op import BY_ROW, Case, Op, Part
from pagoda.ops.sampling import (
    MaskedSampleReference,
    PenalizeReference,
    SampleReference,
    SamplingFacts,
    SamplingRows,
    TokenBitmaskReference,
    TopLogprobsReference,
)

VOCABS = (1, 33, 257, 2048)


def _penalize_oracle(case: Case) -> torch.Tensor:
    logits, prompt, counts, repetition, presence, frequency = (arg.double().numpy() for arg in case.args)
    out = logits.copy()
    for row in range(out.shape[0]):
        for token in range(out.shape[1]):
            if prompt[row, token] or counts[row, token]:
                out[row, token] *= 1 / repetition[row] if out[row, token] > 0 else repetition[row]
            if counts[row, token]:
                out[row, token] -= frequency[row] * counts[row, token] + presence[row]
    return torch.from_numpy(out)


def _penalize_cases(gen: torch.Generator, dtype: str) -> Iterator[Case]:
    for vocab in VOCABS[:3]:
        for rows in (0, 1, 5):
            prompt = torch.rand(rows, vocab, generator=gen) < 0.3
            counts = torch.randint(0, 4, (rows, vocab), generator=gen, dtype=torch.int32) * (torch.rand(rows, vocab, generator=gen) < 0.2)
            knobs = torch.rand(3, rows, generator=gen)
            logits = draw(gen, rows, vocab, dtype=dtype, scale=4)
            args = (logits, prompt, counts.int(), 0.5 + knobs[0] * 1.5, knobs[1] * 4 - 2, knobs[2] * 4 - 2)
            yield Case(f"{rows}×{vocab}", SamplingFacts(dtype, vocab), args, consumes=(0,))


PENALIZE = Op(
    "penalize", PenalizeReference, _penalize_oracle, lambda case: tolerance("float32", roundings=4),
    _penalize_cases, by_rows(0, 1, 2, 3, 4, 5), claims=BY_ROW,
)  # fmt: skip


def _bitmask_oracle(case: Case) -> torch.Tensor:
    logits, mask = case.args
    out = logits.double().clone()
    for row, words in enumerate(mask.tolist()):
        for token in range(out.shape[1]):
            if not words[token // 32] & 0xFFFFFFFF & (1 << token % 32):
                out[row, token] = -math.inf
    return out


def _bitmask_cases(gen: torch.Generator, dtype: str) -> Iterator[Case]:
    for vocab in (1, 31, 32, 33, 257):
        for rows in (0, 1, 3):
            words = torch.randint(-(2**31), 2**31, (rows, -(-vocab // 32)), generator=gen).int()
            yield Case(f"{rows}×{vocab}", SamplingFacts(dtype, vocab), (draw(gen, rows, vocab, dtype=dtype), words), consumes=(0,))


TOKEN_BITMASK = Op(
    "apply_token_bitmask", TokenBitmaskReference, _bitmask_oracle, lambda case: 0.0, _bitmask_cases, by_rows(0, 1), claims=BY_ROW
)  # fmt: skip


class RowKnobs(NamedTuple):
    """One row's settings, as plain numbers."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    position: int


class Draw(NamedTuple):
    """A token, and how far the nearest decision was from falling otherwise (in probability)."""

    token: int
    margin: float


def true_uniform(seed: int, position: int) -> float:
    """The draw of (seed, position) in plain integers."""
    state = 0x9E3779B9
    for word in (seed, seed >> 32, position, position >> 32):
        state = _finalise(state ^ (word & 0xFFFFFFFF))
    return _finalise(state) / 2**32


def _finalise(x: int) -> int:
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = (x ^ (x >> shift)) * factor & 0xFFFFFFFF
    return x ^ (x >> 16)


def true_draw(logits: np.ndarray, knobs: RowKnobs) -> Draw:
    """What `sample` must give for one row."""
    if knobs.temperature <= 0:
        return Draw(int(np.argmax(logits)), 1.0)
    weights = np.exp((logits - logits.max()) / knobs.temperature)
    probs = weights / weights.sum()
    order = np.argsort(-logits, kind="stable")
    floor = knobs.min_p * probs.max()
    margin = float(np.abs(probs / floor - 1).min()) if knobs.min_p else 1.0
    kept = [i for i in order if probs[i] >= floor]
    kept = kept[: knobs.top_k] if knobs.top_k > 0 else kept
    before = np.concatenate(([0.0], np.cumsum(probs[kept]) / probs[kept].sum()))[:-1]
    margin = min(margin, float(np.abs(before - knobs.top_p).min()) if knobs.top_p < 1 else 1.0)
    kept = sorted(i for place, i in enumerate(kept) if place == 0 or before[place] < knobs.top_p)
    edges = np.cumsum(probs[kept]) / probs[kept].sum()
    u = true_uniform(knobs.seed, knobs.position)
    margin = min(margin, float(np.abs(edges[:-1] - u).min()) if len(kept) > 1 else 1.0)
    return Draw(int(kept[min(int((edges <= u).sum()), len(kept) - 1)]), margin)


def _sample_oracle(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    logits, rows = case.args
    columns = (rows.temperature, rows.top_k, rows.top_p, rows.min_p, rows.seed, rows.position)
    knobs = [RowKnobs(*values) for values in zip(*(column.tolist() for column in columns), strict=True)]
    drawn = [true_draw(line, knob).token for line, knob in zip(logits.double().numpy(), knobs, strict=True)]
    return torch.tensor(drawn, dtype=torch.int64), torch.zeros(len(drawn), dtype=torch.bool)


_KINDS = ((0, 1.0, 0.0), (1, 1.0, 0.0), (5, 1.0, 0.0), (0, 0.9, 0.0), (0, 0.3, 0.0), (0, 1.0, 0.1), (40, 0.8, 0.02), (10**9, 1.0, 0.0))
_SAFE = 1e-5
"""Draws nearer than this to a decision depend on the last bits of a float32 sum; the generator takes the next position instead."""


def _rows(gen: torch.Generator, logits: torch.Tensor, kinds: tuple[tuple[int, float, float], ...], greedy: float) -> list[RowKnobs]:
    rows = []
    for index, line in enumerate(logits.double().numpy()):
        top_k, top_p, min_p = kinds[index % len(kinds)]
        hot = 0.3 + 1.5 * float(torch.rand((), generator=gen))
        temperature = 0.0 if float(torch.rand((), generator=gen)) < greedy else float(np.float32(hot))
        seed = int(torch.randint(-(2**62), 2**62, (), generator=gen))
        knobs = RowKnobs(temperature, top_k, float(np.float32(top_p)), float(np.float32(min_p)), seed, index)
        rows.append(next(other for other in _nearby(knobs) if true_draw(line, other).margin > _SAFE))
    return rows


def _nearby(knobs: RowKnobs) -> Iterator[RowKnobs]:
    for n in range(1000):
        top_p = float(np.float32(knobs.top_p - 0.0001 * n * (knobs.top_p < 1)))
        yield knobs._replace(position=knobs.position + n, top_p=top_p, min_p=float(np.float32(knobs.min_p * (1 + 0.001 * n))))


def _pack(rows: list[RowKnobs], all_greedy: bool = False, any_filter: bool = True) -> SamplingRows:
    kinds = (torch.float32, torch.int32, torch.float32, torch.float32, torch.int64, torch.int64)
    temperature, top_k, top_p, min_p, seed, position = (torch.tensor([row[i] for row in rows], dtype=kind) for i, kind in enumerate(kinds))
    return SamplingRows(temperature, top_k, top_p, min_p, seed, position, all_greedy, any_filter)


def _sample_cases(gen: torch.Generator, dtype: str) -> Iterator[Case]:
    for vocab in VOCABS:
        facts = SamplingFacts(dtype, vocab)
        for count in (0, 1, 17):
            logits = draw(gen, count, vocab, dtype=dtype, scale=2.5)
            yield Case(f"{count}×{vocab} filtered", facts, (logits, _pack(_rows(gen, logits, _KINDS, 0.2))), consumes=(0,))
            plain = _rows(gen, logits, _KINDS[:1], 0.2)
            yield Case(f"{count}×{vocab} plain", facts, (logits, _pack(plain, any_filter=False)), consumes=(0,))
            yield Case(f"{count}×{vocab} plain, not told", facts, (logits, _pack(plain)), consumes=(0,))
            greedy = _rows(gen, logits, _KINDS[:1], 1.1)
            yield Case(f"{count}×{vocab} greedy", facts, (logits, _pack(greedy, all_greedy=True)), consumes=(0,))
    logits = draw(gen, 17, 100, dtype=dtype, scale=2.5)
    logits[:, ::3] = -math.inf
    yield Case("banned tokens", SamplingFacts(dtype, 100), (logits, _pack(_rows(gen, logits, _KINDS, 0.2))), consumes=(0,))
    ties = torch.randint(0, 3, (17, 100), generator=gen).to(dtype_of(dtype))
    yield Case("ties", SamplingFacts(dtype, 100), (ties, _pack(_rows(gen, ties, _KINDS, 0.3))), consumes=(0,))
    yield Case("strided", SamplingFacts(dtype, 100), (strided(ties), _pack(_rows(gen, ties, _KINDS, 0.3))), consumes=(0,))


def _sample_split(case: Case) -> Iterator[Part]:
    logits, rows = case.args
    names = ("temperature", "top_k", "top_p", "min_p", "seed", "position")
    for row in range(logits.shape[0]):
        piece = slice(row, row + 1)
        alone = replace(rows, **{name: getattr(rows, name)[piece] for name in names})
        yield Part(replace(case, label=f"{case.label}, row {row} alone", args=(logits[piece], alone)), piece)


SAMPLE = Op("sample", SampleReference, _sample_oracle, lambda case: 0.0, _sample_cases, _sample_split, claims=BY_ROW)


def _allowed(masks: torch.Tensor, vocab: int) -> np.ndarray:
    """`[S, vocab]` bool, bit by bit."""
    rows = [[words[token // 32] >> token % 32 & 1 for token in range(vocab)] for words in masks.tolist()]
    return np.array(rows, bool).reshape(len(rows), vocab)


def _masked_oracle(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    logits, masks, rows = case.args
    allowed = _allowed(masks, logits.shape[1])
    shown = torch.from_numpy(np.where(allowed, logits.double().numpy(), -math.inf))
    alive = torch.from_numpy(allowed.any(1))
    drawn, bad = _sample_oracle(replace(case, args=(torch.where(alive[:, None], shown, 0.0), rows)))
    return torch.where(alive, drawn, 0), bad


def draw_masks(gen: torch.Generator, rows: int, vocab: int) -> torch.Tensor:
    """Of each kind that grammars make: any words, few tokens, all, all but few, one, none."""
    bits = torch.rand(rows, vocab, generator=gen)
    for row, line in enumerate(bits):
        kind = row % 6
        if kind in (1, 3):
            line.copy_(line < 0.002 if kind == 1 else line < 0.97)
        elif kind == 4:
            line.copy_(torch.arange(vocab) == int(torch.randint(0, vocab, (), generator=gen)))
        else:
            line.copy_({0: line < 0.5, 2: torch.ones_like(line), 5: torch.zeros_like(line)}[kind])
    padded = np.zeros((rows, -(-vocab // 32) * 32), np.uint8)
    padded[2::6] = 1  # past the last token too
    padded[:, :vocab] = bits.bool().numpy()
    packed = np.packbits(padded, axis=1, bitorder="little").view(np.int32)
    return torch.from_numpy(packed.reshape(rows, -(-vocab // 32)))


def _masked_case(gen: torch.Generator, dtype: str, rows: int, vocab: int, kind: str) -> Case:
    logits, masks = draw(gen, rows, vocab, dtype=dtype, scale=2.5), draw_masks(gen, rows, vocab)
    allowed = torch.from_numpy(_allowed(masks, vocab))
    shown = torch.where(allowed | ~allowed.any(1, keepdim=True), logits, -math.inf)
    if kind == "filtered":  # what may not be chosen has no say, were it no number or the largest
        strange = torch.where(torch.rand(rows, vocab, generator=gen) < 0.5, math.nan, math.inf)
        logits = torch.where(allowed, logits, strange.to(logits.dtype))
    knobs = _rows(gen, shown, _KINDS if kind == "filtered" else _KINDS[:1], 1.1 if kind == "greedy" else 0.2)
    packed = _pack(knobs, all_greedy=kind == "greedy", any_filter=kind == "filtered")
    return Case(f"{rows}×{vocab} {kind}", SamplingFacts(dtype, vocab), (logits, masks, packed), consumes=(0,))


def _masked_cases(gen: torch.Generator, dtype: str) -> Iterator[Case]:
    for vocab in (1, 31, 32, 33, 257, 2048):
        for rows in (0, 1, 18):
            for kind in ("filtered", "plain", "greedy"):
                yield _masked_case(gen, dtype, rows, vocab, kind)
    for vocab in (49152, 49153):
        yield _masked_case(gen, dtype, 6, vocab, "greedy")
        yield _masked_case(gen, dtype, 6, vocab, "plain")
    ties = torch.randint(0, 3, (18, 100), generator=gen).to(dtype_of(dtype))
    masks = draw_masks(gen, 18, 100)
    greedy = _pack(_rows(gen, torch.where(torch.from_numpy(_allowed(masks, 100)), ties, 0), _KINDS[:1], 1.1))
    yield Case("ties, strided", SamplingFacts(dtype, 100), (strided(ties), masks, greedy), consumes=(0,))


def _masked_split(case: Case) -> Iterator[Part]:
    logits, masks, rows = case.args
    for part in _sample_split(replace(case, args=(logits, rows))):
        own, knobs = part.case.args
        yield Part(replace(part.case, args=(own, masks[part.rows], knobs)), part.rows)


MASKED_SAMPLE = Op(
    "masked_sample", MaskedSampleReference, _masked_oracle, lambda case: 0.0, _masked_cases, _masked_split, claims=BY_ROW
)  # fmt: skip


def _logprobs_oracle(case: Case) -> tuple[torch.Tensor, ...]:
    logits, tokens, k = case.args[0].double().numpy(), case.args[1].tolist(), case.args[2]
    top = logits.max(-1, keepdims=True) if logits.size else logits[:, :1]
    logprobs = logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True)) if logits.size else logits
    rank = [1 + int((line > line[token]).sum()) for line, token in zip(logits, tokens, strict=True)]
    ids = np.argsort(-logits, axis=-1, kind="stable")[:, :k]
    chosen = [line[token] for line, token in zip(logprobs, tokens, strict=True)]
    return (
        torch.tensor(chosen, dtype=torch.float64), torch.tensor(rank, dtype=torch.int64),
        torch.from_numpy(np.take_along_axis(logprobs, ids, -1)), torch.from_numpy(ids),
    )  # fmt: skip


def _logprobs_cases(gen: torch.Generator, dtype: str) -> Iterator[Case]:
    for vocab in (1, 33, 129):
        for rows in (0, 1, 5):
            for k in {0, 1, min(5, vocab)}:
                order = [torch.randperm(vocab, generator=gen) for _ in range(rows)]
                # Distinct in bfloat16 as well (257 numbers would not be): which of two equal logits comes first is nobody's business.
                logits = ((torch.stack(order) if rows else torch.zeros(0, vocab)) / 8 - 8).to(dtype_of(dtype))
                tokens = torch.randint(0, vocab, (rows,), generator=gen)
                yield Case(f"{rows}×{vocab}, k {k}", SamplingFacts(dtype, vocab), (logits, tokens, k))


TOP_LOGPROBS = Op(
    "top_logprobs", TopLogprobsReference, _logprobs_oracle,
    lambda case: tolerance("float32", case.facts.vocab, roundings=2), _logprobs_cases, by_rows(0, 1), claims=BY_ROW,
)  # fmt: skip
