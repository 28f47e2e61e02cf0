"""Truth and inputs of `act_gemm`."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from pagoda.ops.act_gemm import ActGemmFacts, ActGemmReference
from pagoda.ops.activation import ActivationFacts
from pagoda.ops.cases.activation import act
from pagoda.ops.cases.common import by_rows, draw, strided, tolerance
from pagoda.ops.cases.linear_fp8 import draw_weights, true_weights
from pagoda.ops.linear_fp8 import GemmFp8Facts
from pagoda.ops.op import Case, Op


def _oracle(case: Case) -> torch.Tensor:
    facts: ActGemmFacts = case.facts
    gate, up = np.split(case.args[0].double().numpy(), 2, axis=-1)
    weight = true_weights(case.weights["weight"], case.weights["scale"], facts.gemm.block)
    bias = case.weights["bias"].double().numpy() if "bias" in case.weights else 0.0
    return torch.from_numpy(np.einsum("tk,nk->tn", act(facts.activation.kind, gate) * up, weight) + bias)


def _cases(gen: torch.Generator, dtype: str) -> Iterator[Case]:
    for block in (0, 128):
        for rows, inner, outer in ((0, 64, 32), (1, 256, 320), (1, 1040, 96), (5, 576, 96), (17, 256, 48), (70, 384, 64)):
            gemm = GemmFp8Facts(dtype, inner, outer, rows == 5, block)
            weights = draw_weights(gen, gemm)
            if gemm.bias:
                weights["bias"] = draw(gen, outer, dtype=dtype)
            x = draw(gen, rows, 2 * inner, dtype=dtype)
            facts = ActGemmFacts(ActivationFacts(dtype, "silu"), gemm)
            yield Case(f"{rows}×{inner}×{outer}, blocks of {block}", facts, (strided(x) if rows % 2 else x,), weights)


def _tolerance(case: Case) -> float:
    # The activation, its product with up, weights and result are rounded.
    return tolerance(case.facts.dtype, case.facts.gemm.in_features, roundings=5)


ACT_GEMM = Op("act_gemm", ActGemmReference, _oracle, _tolerance, _cases, by_rows(0))
