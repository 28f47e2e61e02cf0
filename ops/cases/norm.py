"""Truth and inputs of `rms_norm`, `add_rms_norm`, `layer_norm` and `gated_norm`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from pagoda.ops.cases.common import ROWS, by_rows, draw, strided, tolerance
from pagoda.ops.norm import AddRmsNormReference, GatedNormFacts, GatedNormReference, LayerNormReference, NormFacts, RmsNormReference
from pagoda.ops.op import BY_ROW, Case, Op


def _rms(case: Case, x: np.ndarray) -> torch.Tensor:
    scale = 1.0 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + case.facts.eps)
    weight = case.weights["weight"].double().numpy() + case.facts.offset if case.facts.weight else 1.0
    return torch.from_numpy(x * scale * weight)


def _rms_oracle(case: Case) -> torch.Tensor:
    return _rms(case, case.args[0].double().numpy())


def _add_rms_oracle(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    # The norm is of the sum as it is stored: what is rounded there is part of the definition.
    x, residual = case.args
    total = (x.double() + residual.double()).to(x.dtype).double()
    return _rms(case, total.numpy()), total


def _layer_oracle(case: Case) -> torch.Tensor:
    x = case.args[0].double().numpy()
    out = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + case.facts.eps)
    if case.facts.weight:
        out = out * (case.weights["weight"].double().numpy() + case.facts.offset)
    if case.facts.bias:
        out = out + case.weights["bias"].double().numpy()
    return torch.from_numpy(out)


def _cases(gen: torch.Generator, dtype: str, bias: bool = False) -> Iterator[Case]:
    for width in (1, 64, 129, 576):
        facts = NormFacts(dtype, width, 1e-5, bias=bias)
        weights = {"weight": draw(gen, width, dtype=dtype)} | ({"bias": draw(gen, width, dtype=dtype)} if bias else {})
        for rows in ROWS:
            yield Case(f"{rows}×{width}", facts, (draw(gen, rows, width, dtype=dtype),), weights)
        yield Case("large", facts, (draw(gen, 3, width, dtype=dtype, scale=1e4),), weights)
        yield Case("tiny", facts, (draw(gen, 3, width, dtype=dtype, scale=1e-3),), weights)
        yield Case("heads", facts, (draw(gen, 3, 5, width, dtype=dtype),), weights)
        yield Case("strided", facts, (strided(draw(gen, 5, width, dtype=dtype)),), weights)
        yield Case("strided heads", facts, (strided(draw(gen, 4, 3, width, dtype=dtype))[:, :2],), weights)
        yield Case("offset", replace(facts, offset=1.0), (draw(gen, 3, width, dtype=dtype),), weights)
        yield Case("no weight", replace(facts, weight=False, bias=False), (draw(gen, 3, width, dtype=dtype),))


def _add_cases(gen: torch.Generator, dtype: str) -> Iterator[Case]:
    for case in _cases(gen, dtype):
        x = case.args[0]
        residual = draw(gen, *x.shape, dtype=dtype)
        yield replace(case, args=(x, residual), consumes=(1,))


def _layer_cases(gen: torch.Generator, dtype: str) -> Iterator[Case]:
    for bias in (False, True):
        # One number has no variance: its norm is 0/√eps, which rounding of the mean alone decides.
        yield from (case for case in _cases(gen, dtype, bias) if case.facts.width > 1)


def _gated_oracle(case: Case) -> torch.Tensor:
    facts, (x, gate) = case.facts, (arg.double().numpy() for arg in case.args)
    weight = np.tile(case.weights["weight"].double().numpy(), facts.groups if facts.weight == "shared" else 1)
    factor = (1.0 if facts.gate == "sigmoid" else gate) / (1.0 + np.exp(-gate))
    out = np.empty_like(x)
    for group in range(facts.groups):
        part = slice(group * facts.width, (group + 1) * facts.width)
        seen = x[:, part] * factor[:, part] if facts.gate_first else x[:, part]
        out[:, part] = seen / np.sqrt((seen * seen).mean(-1, keepdims=True) + facts.eps) * weight[part]
    return torch.from_numpy(out if facts.gate_first else out * factor)


def _gated_cases(gen: torch.Generator, dtype: str) -> Iterator[Case]:
    shapes = ((8, 3), (129, 1), (128, 5), (640, 2))
    kinds = (GatedNormFacts(dtype, 1, 1, 1e-5), GatedNormFacts(dtype, 1, 1, 1e-6, "silu", True, "own"),
             GatedNormFacts(dtype, 1, 1, 1e-6, "sigmoid", False, "own"), GatedNormFacts(dtype, 1, 1, 1e-5, "sigmoid", True))  # fmt: skip
    for width, groups in shapes:
        for kind in kinds:
            facts, whole = replace(kind, width=width, groups=groups), width * groups
            weights = {"weight": draw(gen, width if facts.weight == "shared" else whole, dtype=dtype)}
            for rows in ROWS:
                args = draw(gen, rows, whole, dtype=dtype), draw(gen, rows, whole, dtype=dtype)
                yield Case(f"{rows}×{groups}×{width}", facts, args, weights)
            args = strided(draw(gen, 5, whole, dtype=dtype)), strided(draw(gen, 5, whole, dtype=dtype, scale=8.0))
            yield Case("strided, gates far from 0", facts, args, weights)
            args = draw(gen, 3, whole, dtype=dtype, scale=1e-3), draw(gen, 3, whole, dtype=dtype)
            yield Case("tiny", facts, args, weights)


def _tolerance(case: Case) -> float:
    return tolerance(case.facts.dtype, case.facts.width, roundings=2)


RMS_NORM = Op("rms_norm", RmsNormReference, _rms_oracle, _tolerance, _cases, by_rows(0))
ADD_RMS_NORM = Op("add_rms_norm", AddRmsNormReference, _add_rms_oracle, _tolerance, _add_cases, by_rows(0, 1))
LAYER_NORM = Op("layer_norm", LayerNormReference, _layer_oracle, _tolerance, _layer_cases, by_rows(0), claims=BY_ROW)
GATED_NORM = Op("gated_norm", GatedNormReference, _gated_oracle, _tolerance, _gated_cases, by_rows(0, 1))
