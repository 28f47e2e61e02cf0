"""Truth and inputs of `head_gemm`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from pagoda.ops.cases.common import ROWS, by_rows, draw, strided, tolerance
from pagoda.ops.head_gemm import HeadGemmFacts, HeadGemmReference
from pagoda.ops.op import Case, Op


def _oracle(case: Case) -> torch.Tensor:
    x, weight = case.args[0].double().numpy(), case.weights["weight"].double().numpy()
    return torch.from_numpy(np.stack([x[:, head] @ weight[head].T for head in range(len(weight))], 1))


def _case(gen: torch.Generator, facts: HeadGemmFacts, label: str, rows: int) -> Case:
    weight = draw(gen, facts.heads, facts.out_features, facts.in_features, dtype=facts.dtype, scale=facts.in_features**-0.5)
    return Case(label, facts, (draw(gen, rows, facts.heads, facts.in_features, dtype=facts.dtype),), {"weight": weight})


def _cases(gen: torch.Generator, dtype: str) -> Iterator[Case]:
    for heads, inner, outer in ((4, 16, 32), (3, 6, 5), (16, 128, 512), (1, 64, 64)):
        facts = HeadGemmFacts(dtype, heads, inner, outer)
        for rows in ROWS if heads == 4 else (1, 9):
            yield _case(gen, facts, f"{rows} rows, {heads} heads of {inner}×{outer}", rows)
    # A part of each head, as the query's is that is not rotated.
    case = _case(gen, HeadGemmFacts(dtype, 4, 16, 24), "a part of each head", 5)
    yield replace(case, args=(strided(case.args[0]),))


HEAD_GEMM = Op(
    "head_gemm", HeadGemmReference, _oracle, lambda case: tolerance(case.facts.dtype, case.facts.in_features), _cases, by_rows(0)
)  # fmt: skip
