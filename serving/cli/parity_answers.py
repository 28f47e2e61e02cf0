"""Comparing an engine's greedy answers and log-probabilities with a reference's."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import torch
from pagoda.serving.conformance.comparison import Finding, Tolerance, compare_greedy
from pagoda.serving.engine.params import MAX_LOGPROBS, SamplingParams
from pagoda.serving.frontend.outputs import Logprob

Reference = dict[str, torch.Tensor]


def engine_findings(
    name: str, tokens: list[int], logprobs: Sequence[dict[int, Logprob]], reference: Reference, tolerance: Tolerance, turn: str = "engine"
) -> list[Finding]:
    """Of an answer's tokens and their log-probabilities; `turn` names it."""
    want, rows = reference[f"{name}.tokens"].tolist(), reference[f"{name}.logits"]
    found, _ = compare_greedy(f"{name}.{turn}", tokens, rows[: len(tokens)], want, rows, tolerance)
    same = found.compared + (tokens != want[: len(tokens)])
    return [found, logprobs_finding(f"{name}.{turn}.logprobs", logprobs[:same], rows, tolerance)]


def logprobs_finding(name: str, got: Sequence[dict[int, Logprob]], rows: torch.Tensor, tolerance: Tolerance) -> Finding:
    """Of the likeliest ids at each position, held against the reference's logits."""
    if not got or len(got) > len(rows):
        return Finding(name, False, note=f"{len(got)} positions instead of {len(rows)}")
    want = rows.double().log_softmax(-1)
    spread = max(float(rows.double().std(unbiased=False)), 1e-9)
    errors = [max(abs(entry.logprob - float(row[token])) for token, entry in entries.items()) / spread for row, entries in zip(want, got)]
    return Finding(name, max(errors) <= tolerance.error, max(errors), len(got), median=median(errors))


def greedy_params(reference: Reference, name: str, whole: bool = True) -> SamplingParams:
    """As many greedy tokens as the reference has; `whole`: with the prompt's log-probabilities where it has them."""
    prompt = MAX_LOGPROBS if whole and f"{name}.full_logits" in reference else None
    count = len(reference[f"{name}.tokens"])
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, logprobs=MAX_LOGPROBS, prompt_logprobs=prompt)
