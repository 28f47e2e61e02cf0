"""Compares outputs with a recorded reference: errors in standard deviations of the reference, near-ties of greedy tokens forgiven."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Tolerance:
    """Largest error, and largest lead of a greedy token that counts as a tie, in standard deviations of the reference.

    `typical`: the largest that half of all rows may be off, for where some may be far off: those in which rounding chose another
    expert.
    """

    error: float = 1e-3
    tie: float = 0.02
    typical: float = math.inf


TOLERANCES = {"float32": Tolerance(), "bfloat16": Tolerance(0.1, 0.15)}
"""By compute dtype. In bfloat16 transformers itself is off by up to 0.06 and parts at leads of up to 0.09."""


@dataclass(frozen=True)
class Terms:
    """How a checkpoint is run and judged: `ranks` that each layer is split over, `dtype` of its weights and sums."""

    ranks: int = 1
    dtype: str = "float32"
    tolerance: Tolerance = TOLERANCES["float32"]


@dataclass(frozen=True)
class Finding:
    """One comparison. `error`: the largest, in standard deviations, and `median` of rows; `compared`: rows or tokens that it covers."""

    name: str
    passed: bool
    error: float = 0.0
    compared: int = 0
    note: str = ""
    median: float | None = None


def rows_off(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """The largest error of each row, in standard deviations of the reference, float64."""
    wide, reference = got.double(), want.double()
    return (wide - reference).abs().reshape(len(want), -1).amax(1) / max(float(reference.std(unbiased=False)), 1e-9)


def compare_values(name: str, got: torch.Tensor, want: torch.Tensor, tolerance: Tolerance) -> Finding:
    """Numbers against numbers of the same shape."""
    if got.shape != want.shape:
        return Finding(name, False, note=f"shape {list(got.shape)} instead of {list(want.shape)}")
    if not bool(torch.isfinite(got).all()):
        return Finding(name, False, note="not finite")
    rows = rows_off(got, want)
    error = float(rows.max())
    return Finding(name, error <= tolerance.error, error, got.shape[0], median=float(rows.median()))


def compare_typical(findings: Sequence[Finding], tolerance: Tolerance) -> Finding:
    """The median of what comparisons of numbers were typically off by."""
    medians = torch.tensor([finding.median for finding in findings if finding.median is not None], dtype=torch.float64)
    typical = float(medians.median()) if len(medians) else math.inf
    return Finding("half of all rows", typical <= tolerance.typical, typical, len(medians))


FAR = 0.25
"""Standard deviations of the reference from which a row is far off, beside what a tolerance calls so."""
UNEXPLAINED = 2.5
"""Standard deviations of a coin thrown for each row that is far off on one side alone; beyond, it is no coin."""


def compare_beside(rows: torch.Tensor, others: torch.Tensor, tolerance: Tolerance) -> Finding:
    """Whether more rows `[R]` are far off than of the oracle's own in the same dtype (`others`, `[runs, R]`).

    Rows in which rounding turns an expert say nothing by how far off they are; but as many should turn here as there. Those that are
    far off on one side alone are counted (McNemar's test): (ours − theirs) / √(ours + theirs), where it is most of two limits, and of
    the oracle's runs the one in the middle: which rows turn in one of them is chance, and a row that turns carries others along.
    """

    def beyond(limit: float, run: torch.Tensor) -> float:
        ours, theirs = int(((rows > limit) & (run <= limit)).sum()), int(((rows <= limit) & (run > limit)).sum())
        return (ours - theirs) / math.sqrt(max(ours + theirs, 1))

    limits = max(tolerance.typical, TOLERANCES["bfloat16"].error), FAR
    most = statistics.median(max(beyond(limit, run) for limit in limits) for run in others)
    return Finding("rows that only we have far off", most <= UNEXPLAINED, most, len(rows))


TIMES = 1.75
"""Of the oracle's own error in the same dtype that half of the rows may be off.

On a CPU ours are 0.7 to 1.02 times, over one checkpoint of each kind of block; the oracle itself, its products rounded
stochastically, which is up to √2 times the error, 0.98 to 1.51 times.
"""
SEEN = 1e-3
"""Standard deviations of the reference below which no row's error counts as more or less than another's."""


def compare_paired(rows: torch.Tensor, others: torch.Tensor) -> Finding:
    """How many times the oracle's own error in the same dtype (`others`) each of the rows `[R]` is off, typically: the median of quotients.

    Row by row, for errors depend more on the text than on who computes; so it tells numbers apart that are a little worse everywhere,
    which neither a bound for the worst row nor one for rows that are far off does.
    """
    times = float((rows.clamp_min(SEEN) / others.clamp_min(SEEN)).median())
    return Finding("half of the rows beside the oracle's", times <= TIMES, times, len(rows))


def compare_greedy(
    name: str, tokens: Sequence[int], logits: torch.Tensor, want_tokens: Sequence[int], want_logits: torch.Tensor, tolerance: Tolerance
) -> tuple[Finding, Finding]:
    """Greedy tokens, and the logits that they came from, `[tokens, vocab]`.

    The first token that differs passes if it is no more than a tie behind the reference's; what follows it is not compared, for
    it answers another text. Too few tokens fail.
    """
    parted = next((i for i, (have, want) in enumerate(zip(tokens, want_tokens, strict=False)) if have != want), None)
    finding = _parting(name, tokens, want_tokens, want_logits, parted, tolerance)
    rows = len(tokens) if parted is None else parted + 1
    return finding, compare_values(f"{name}.logits", logits[:rows], want_logits[:rows], tolerance)


def _parting(
    name: str, tokens: Sequence[int], want_tokens: Sequence[int], want_logits: torch.Tensor, parted: int | None, tolerance: Tolerance
) -> Finding:
    if parted is None:
        short = len(tokens) < len(want_tokens)
        return Finding(f"{name}.tokens", not short, 0.0, len(tokens), f"only {len(tokens)} of {len(want_tokens)} tokens" if short else "")
    row, have, want = want_logits[parted].double(), tokens[parted], want_tokens[parted]
    gap = float(row[want] - row[have]) / max(float(row.std(unbiased=False)), 1e-9) if 0 <= have < len(row) else float("inf")
    tie = gap <= tolerance.tie
    note = f"token {parted}: {have} instead of {want}, {gap:.4f} standard deviations behind" + (" (a tie)" if tie else "")
    return Finding(f"{name}.tokens", tie, 0.0, parted, note)
