"""Truth and inputs of `norm_gemm`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from pagoda.ops.activation import ActivationFacts
from pagoda.ops.cases.activation import act
from pagoda.ops.cases.common import ROWS, by_rows, draw, strided, tolerance
from pagoda.ops.cases.linear_fp8 import draw_weights, true_weights
from pagoda.ops.linear import GemmFacts
from pagoda.ops.linear_fp8 import GemmFp8Facts
from pagoda.ops.norm import NormFacts
from pagoda.ops.norm_gemm import NormGemmFacts, NormGemmReference
from pagoda.ops.op import Case, Op


def _oracle(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    facts, weights = case.facts, {name: tensor.double().numpy() for name, tensor in case.weights.items()}
    # The sum is part of the result, rounded like it: what follows sees it so.
    total = (case.args[0].double() + case.args[1].double()).to(case.args[0].dtype).double().numpy()
    scale = 1 / np.sqrt((total**2).mean(-1, keepdims=True) + facts.norm.eps)
    normed = total * scale * (weights["norm"] + facts.norm.offset)
    matrix = weights["weight"]
    if isinstance(facts.gemm, GemmFp8Facts):
        matrix = true_weights(case.weights["weight"], case.weights["scale"], facts.gemm.block)
    out = np.einsum("tk,nk->tn", normed, matrix) + weights.get("bias", 0.0)
    if facts.activation is not None:
        gate, up = np.split(out, 2, axis=-1)
        out = act(facts.activation.kind, gate) * up
    return torch.from_numpy(out), torch.from_numpy(total)


def _case(gen: torch.Generator, facts: NormGemmFacts, label: str, rows: int, scale: float = 1.0) -> Case:
    inner, outer, dtype = facts.gemm.in_features, facts.gemm.out_features, facts.dtype
    weights = {"norm": draw(gen, inner, dtype=dtype)}
    if isinstance(facts.gemm, GemmFp8Facts):
        weights |= draw_weights(gen, facts.gemm)
    else:
        weights["weight"] = draw(gen, outer, inner, dtype=dtype, scale=inner**-0.5)
    if facts.gemm.bias:
        weights["bias"] = draw(gen, outer, dtype=dtype)
    x, residual = (draw(gen, rows, inner, dtype=dtype, scale=scale) for _ in range(2))
    return Case(label, facts, (strided(x) if rows % 2 else x, residual), weights, consumes=(1,))


def _facts(dtype: str, inner: int, outer: int, gated: bool = False, bias: bool = False, offset: float = 0.0) -> NormGemmFacts:
    activation = ActivationFacts(dtype, "silu") if gated else None
    return NormGemmFacts(NormFacts(dtype, inner, 1e-6, offset), GemmFacts(dtype, inner, outer, bias), activation)


def _cases(gen: torch.Generator, dtype: str) -> Iterator[Case]:
    for gated in (False, True):
        name = "gated " if gated else ""
        for rows in ROWS:
            yield _case(gen, _facts(dtype, 192, 320, gated, bias=rows % 2 == 1), f"{name}{rows} rows", rows)
        for inner, outer, rows in ((1, 2, 1), (63, 66, 3), (576, 34, 1), (1030, 70, 8), (2048, 96, 5), (256, 96, 70)):
            yield _case(gen, _facts(dtype, inner, outer, gated, bias=True), f"{name}{rows}×{inner}×{outer}", rows)
    for rows in (1, 7):
        yield _case(gen, _facts(dtype, 256, 96, offset=1.0), f"weights with an offset, {rows} rows", rows)
        yield _case(gen, _facts(dtype, 1024, 96, True), f"large magnitudes, {rows} rows", rows, scale=300.0)
    yield _case(gen, _facts(dtype, 1024, 4096, bias=True), "a product that models have, 5 rows", 5)
    for rows, inner, outer in ((512, 192, 320), (645, 72, 528)):
        yield _case(gen, _facts(dtype, inner, outer, True), f"gated, many rows, {rows}×{inner}×{outer}", rows)
    yield from _fp8_cases(gen, dtype)


def _fp8_cases(gen: torch.Generator, dtype: str) -> Iterator[Case]:
    for block in (0, 128):
        for rows, inner, outer, gated in ((1, 256, 320, False), (1, 1040, 96, True), (5, 576, 512, True), (70, 256, 96, False)):
            plain = _facts(dtype, inner, outer, gated)
            facts = replace(plain, gemm=GemmFp8Facts(dtype, inner, outer, rows == 5, block))
            yield _case(gen, facts, f"float8, blocks of {block}, {rows}×{inner}×{outer}{', gated' if gated else ''}", rows)


def _tolerance(case: Case) -> float:
    # Norm and weights, sum, product, gate, up and their product are rounded.
    return tolerance(case.facts.dtype, case.facts.gemm.in_features, roundings=6 if case.facts.activation else 4)


NORM_GEMM = Op("norm_gemm", NormGemmReference, _oracle, _tolerance, _cases, by_rows(0, 1))
