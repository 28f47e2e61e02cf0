"""Whether tokens come as often as they should: χ² against the exact distribution in float64, for each filter and each edit of logits."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pagoda.hal.discovery import choose
from pagoda.hal.kernel import KernelRun
from pagoda.ops.sampling import SamplingFacts, SamplingRows
from pagoda.ops.table import kernel_table

Floats = NDArray[np.float64]
VOCABS = (40, 151_936)
FILTERS = {
    "temperature": (0.7, 0, 1.0, 0.0), "top-k": (1.0, 7, 1.0, 0.0), "top-p": (1.3, 0, 0.8, 0.0), "min-p": (1.0, 0, 1.0, 0.1),
    "joint": (0.9, 12, 0.9, 0.02),
}  # fmt: skip
"""Temperature, top-k, top-p, min-p."""
PENALTIES = (1.3, 0.6, 0.25)
"""Repetition, presence, frequency."""
AT_ONCE = 2000
FEWEST = 10
"""Draws that a token is expected to get before it is counted by itself."""


def sampling(options: argparse.Namespace) -> dict[str, Any]:
    """χ² of 20,000 draws for temperature, top-k, top-p, min-p, all of them, bitmasks and penalties, at 40 and 151,936 tokens."""
    backend = choose(options.device).backend
    device = backend.open(0)
    table, rows = kernel_table(backend, device.info), []
    for vocab in VOCABS:
        facts = SamplingFacts("float32", vocab)
        line = (torch.randn(vocab, generator=torch.Generator().manual_seed(5)) * 2.5).to(device.torch_device)
        edits = {"bitmask": _masked(table.resolve("apply_token_bitmask", facts), line), "penalties": _penalised(table, facts, line)}
        sample = table.resolve("sample", facts)
        for name, settings in FILTERS.items():
            rows.append(_judge(sample, line, line.cpu().double().numpy(), name, settings, options.draws))
        for name, (edited, exact) in edits.items():
            rows.append(_judge(sample, edited, exact, name, FILTERS["temperature"], options.draws))
    return {"ok": all(row["ok"] for row in rows), "rows": rows, "kernel": table.choose("sample", facts).chosen.name}


def _judge(sample: KernelRun, line: torch.Tensor, exact: Floats, name: str, settings: tuple[float, int, float, float], draws: int) -> Any:
    vocab = len(exact)
    seen = np.zeros(vocab, np.int64)
    for first in range(0, draws, AT_ONCE):
        count = min(AT_ONCE, draws - first)
        counter = torch.arange(first, first + count, device=line.device)
        temperature, k, p, least = (torch.full((count,), value, device=line.device) for value in settings)
        rows = SamplingRows(temperature, k.int(), p, least, counter % 3, counter // 3, any_filter=settings[1:] != (0, 1.0, 0.0))
        tokens, _ = sample.run(line.expand(count, vocab), rows)
        seen += np.bincount(tokens.cpu().numpy(), minlength=vocab)
    wanted = _probabilities(exact, *settings) * draws
    # A token at the edge of a filter may fall to either side of it in float32.
    outside = int(seen[wanted == 0].sum())
    statistic, freedom = _chi_squared(seen, wanted)
    limit = float(freedom + 5 * np.sqrt(2 * freedom))
    row = {"filter": name, "vocab": vocab, "chi2": statistic, "freedom": freedom, "limit": limit, "outside": outside}
    print(row, flush=True)
    return {**row, "ok": statistic < limit and outside <= draws // 2000}


def _chi_squared(seen: NDArray[np.int64], wanted: Floats) -> tuple[float, int]:
    """Over tokens that are expected often enough; the others count as one."""
    many = wanted >= FEWEST
    got, want = np.append(seen[many], seen[~many].sum()).astype(float), np.append(wanted[many], wanted[~many].sum())
    got, want = got[want > 0.5], want[want > 0.5]
    return float(((got - want) ** 2 / want).sum()), max(1, len(want) - 1)


def _probabilities(logits: Floats, temperature: float, k: int, p: float, least: float) -> Floats:
    scaled = logits / temperature
    probs = np.exp(scaled - scaled.max())
    probs /= probs.sum()
    order = np.argsort(-probs, kind="stable")
    kept = order[probs[order] >= least * probs.max()][: k or len(probs)]
    share = probs[kept] / probs[kept].sum()
    kept = kept[np.cumsum(share) - share < p]
    out = np.zeros(len(probs))
    out[kept] = probs[kept] / probs[kept].sum()
    return out


def _masked(kernel: KernelRun, line: torch.Tensor) -> tuple[torch.Tensor, Floats]:
    """Every third token alone."""
    vocab = len(line)
    allowed = np.arange(vocab) % 3 == 1
    bits = np.packbits(np.pad(allowed, (0, -vocab % 32)), bitorder="little").view(np.int32)
    edited = kernel.run(line[None], torch.from_numpy(bits.copy()).to(line.device)[None])[0]
    return edited, np.where(allowed, line.cpu().double().numpy(), -np.inf)


def _penalised(table: Any, facts: SamplingFacts, line: torch.Tensor) -> tuple[torch.Tensor, Floats]:
    """The likeliest tokens were generated or in the prompt."""
    repetition, presence, frequency = PENALTIES
    logits = line.cpu().double().numpy()
    order = np.argsort(-logits)
    prompt, counts = np.zeros(len(logits), bool), np.zeros(len(logits), np.int32)
    prompt[order[:10:2]], counts[order[:12:3]] = True, (1, 2, 3, 5)
    settings = [torch.full((1,), value, device=line.device) for value in PENALTIES]
    told = [torch.from_numpy(array).to(line.device)[None] for array in (prompt, counts)]
    edited = table.resolve("penalize", facts).run(line[None], *told, *settings)[0]
    factor = np.where(prompt | (counts > 0), repetition, 1.0)
    exact = np.where(logits > 0, logits / factor, logits * factor) - frequency * counts - presence * (counts > 0)
    return edited, exact
