"""Truth and inputs of `gated_activation` and `activation`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import torch
from pagoda.ops.activation import ActivationFacts, ActivationReference, GatedActivationReference
from pagoda.ops.cases.common import ROWS, by_rows, draw, strided, tolerance
from pagoda.ops.op import Case, Op

_erf = np.vectorize(math.erf, otypes=[float])


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 0.5 * (1 + np.tanh(0.5 * x))


_TRUE: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "silu": lambda x: x * _sigmoid(x),
    "gelu": lambda x: 0.5 * x * (1 + _erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "relu": lambda x: np.maximum(x, 0),
    "relu2": lambda x: np.maximum(x, 0) ** 2,
    "quick_gelu": lambda x: x * _sigmoid(1.702 * x),
    "sigmoid": _sigmoid,
    "tanh": np.tanh,
}


def act(kind: str, x: np.ndarray) -> np.ndarray:
    """The true activation `kind`, elementwise."""
    return _TRUE[kind](x) if x.size else x


def _plain_oracle(case: Case) -> torch.Tensor:
    return torch.from_numpy(act(case.facts.kind, case.args[0].double().numpy()))


def _gated_oracle(case: Case) -> torch.Tensor:
    x, limit = case.args[0].double().numpy(), case.facts.limit
    half = x.shape[-1] // 2
    gate, up = x[..., :half], x[..., half:]
    if limit is not None:
        gate, up = np.minimum(gate, limit), np.maximum(np.minimum(up, limit), -limit)
    return torch.from_numpy(act(case.facts.kind, gate) * up)


def _plain_cases(gen: torch.Generator, dtype: str) -> Iterator[Case]:
    for kind in _TRUE:
        facts = ActivationFacts(dtype, kind)
        yield Case(f"{kind} empty", facts, (draw(gen, 0, 16, dtype=dtype),))
        yield Case(f"{kind} odd", facts, (draw(gen, 3, 37, dtype=dtype, scale=3),))
        yield Case(f"{kind} large", facts, (draw(gen, 2, 64, dtype=dtype, scale=50),))
        yield Case(f"{kind} strided", facts, (strided(draw(gen, 3, 33, dtype=dtype)),))


def _gated_cases(gen: torch.Generator, dtype: str) -> Iterator[Case]:
    for kind in _TRUE:
        for limit in (None, 1.5):
            facts = ActivationFacts(dtype, kind, limit)
            yield Case(f"{kind} odd", facts, (draw(gen, 3, 74, dtype=dtype, scale=2),))
            yield Case(f"{kind} large", facts, (draw(gen, 2, 64, dtype=dtype, scale=8 if kind == "relu2" else 50),))
    for rows in ROWS:
        yield Case(f"silu {rows} rows", ActivationFacts(dtype, "silu"), (draw(gen, rows, 192, dtype=dtype),))
    yield Case("silu strided", ActivationFacts(dtype, "silu"), (strided(draw(gen, 3, 66, dtype=dtype)),))


def _tolerance(case: Case) -> float:
    return tolerance(case.facts.dtype, roundings=3)


ACTIVATION = Op("activation", ActivationReference, _plain_oracle, _tolerance, _plain_cases, by_rows(0))
GATED_ACTIVATION = Op("gated_activation", GatedActivationReference, _gated_oracle, _tolerance, _gated_cases, by_rows(0))
