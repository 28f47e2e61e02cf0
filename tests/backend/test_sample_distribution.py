"""Every `sample` kernel of every device here draws from the exact distribution: χ² against float64, for each filter."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from pagoda.hal.device import Backend
from pagoda.hal.discovery import find
from pagoda.hal.kernel import Kernel
from pagoda.ops.sampling import SamplingFacts, SamplingRows
from pagoda.ops.table import candidates

VOCAB, DRAWS = 40, 20_000
FILTERS = {
    "none": (0.7, 0, 1.0, 0.0),
    "top-k": (1.0, 7, 1.0, 0.0),
    "top-p": (1.3, 0, 0.8, 0.0),
    "min-p": (1.0, 0, 1.0, 0.1),
    "all": (0.9, 12, 0.9, 0.02),
}
"""Temperature, top-k, top-p, min-p."""


def kernels() -> Iterator[tuple[str, Backend, Kernel]]:
    for name in ("cpu", "cuda"):
        backend = find(name)
        if not backend.probe().available:
            continue
        info = backend.open().info
        for kernel in candidates(backend):
            if kernel.op == "sample" and kernel.refuse(info, SamplingFacts("float32", VOCAB)) is None:
                yield f"{name} {kernel.name}", backend, kernel


def true_probabilities(logits: np.ndarray, temperature: float, k: int, p: float, least: float) -> np.ndarray:
    probs = np.exp(logits / temperature)
    probs /= probs.sum()
    order = np.argsort(-probs, kind="stable")
    kept = order[probs[order] >= least * probs.max()][: k or VOCAB]
    share = probs[kept] / probs[kept].sum()
    kept = kept[np.cumsum(share) - share < p]
    out = np.zeros(VOCAB)
    out[kept] = probs[kept] / probs[kept].sum()
    return out


@pytest.mark.parametrize("settings", FILTERS.values(), ids=FILTERS)
@pytest.mark.parametrize(("backend", "kernel"), [case[1:] for case in kernels()], ids=[case[0] for case in kernels()])
def test_tokens_come_as_often_as_they_should(backend: Backend, kernel: Kernel, settings: tuple[float, int, float, float]) -> None:
    device = backend.open().torch_device
    line = torch.randn(VOCAB, generator=torch.Generator().manual_seed(5)) * 1.5
    temperature, k, p, least = (torch.full((DRAWS,), value, device=device) for value in settings)
    counter = torch.arange(DRAWS, device=device)
    rows = SamplingRows(temperature, k.int(), p, least, counter % 3, counter // 3, any_filter=settings[1:] != (0, 1.0, 0.0))
    tokens, _ = kernel.load(SamplingFacts("float32", VOCAB)).run(line.to(device).expand(DRAWS, VOCAB), rows)
    seen = np.bincount(tokens.cpu().numpy(), minlength=VOCAB)
    wanted = true_probabilities(line.double().numpy(), *settings) * DRAWS
    assert not seen[wanted == 0].any()
    there = wanted > 0
    freedom = there.sum() - 1
    statistic = float(((seen - wanted)[there] ** 2 / wanted[there]).sum())
    assert statistic < freedom + 5 * np.sqrt(2 * freedom)
