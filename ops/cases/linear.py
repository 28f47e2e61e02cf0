"""Truth and inputs of `gemm` and `embedding`."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from pagoda.ops.cases.common import ROWS, by_rows, draw, strided, tolerance
from pagoda.ops.linear import EmbeddingFacts, EmbeddingReference, GemmFacts, GemmReference
from pagoda.ops.op import BY_ROW, Case, Op


def _gemm_oracle(case: Case) -> torch.Tensor:
    x, weight = case.args[0].double().numpy(), case.weights["weight"].double().numpy()
    out = np.einsum("tk,nk->tn", x, weight)
    if "bias" in case.weights:
        out = out + case.weights["bias"].double().numpy()
    return torch.from_numpy(out)


def _gemm_case(gen: torch.Generator, dtype: str, label: str, rows: int, shape: tuple[int, int], bias: bool, scale: float = 1.0) -> Case:
    inner, outer = shape
    weights = {"weight": draw(gen, outer, inner, dtype=dtype, scale=inner**-0.5)}
    if bias:
        weights["bias"] = draw(gen, outer, dtype=dtype)
    return Case(label, GemmFacts(dtype, inner, outer, bias), (draw(gen, rows, inner, dtype=dtype, scale=scale),), weights)


def _gemm_cases(gen: torch.Generator, dtype: str) -> Iterator[Case]:
    for rows in ROWS:
        yield _gemm_case(gen, dtype, f"{rows} rows", rows, (192, 320), bias=rows % 2 == 1)
    for inner, outer in ((1, 1), (63, 65), (576, 17), (129, 256), (2049, 33)):
        for rows in (1, 3, 8):
            yield _gemm_case(gen, dtype, f"{rows}×{inner}×{outer}", rows, (inner, outer), bias=True)
    for rows, inner, outer in ((64, 2, 1), (67, 34, 33), (77, 1030, 70), (130, 576, 96)):
        yield _gemm_case(gen, dtype, f"prompt of {rows}×{inner}×{outer}", rows, (inner, outer), bias=rows % 2 == 1)
    for rows in (1, 8, 33):
        yield _gemm_case(gen, dtype, f"a model's layer, {rows} rows", rows, (2048, 1024), bias=rows == 8)
    for rows in (1, 5, 70):
        yield _gemm_case(gen, dtype, "large magnitudes", rows, (256, 128), bias=False, scale=1e3)
        case = _gemm_case(gen, dtype, "strided rows", rows, (256, 128), bias=False)
        yield Case(f"{case.label}, {rows}", case.facts, (strided(case.args[0]),), case.weights)


GEMM = Op(
    "gemm", GemmReference, _gemm_oracle, lambda case: tolerance(case.facts.dtype, case.facts.in_features), _gemm_cases, by_rows(0)
)  # fmt: skip


def _embedding_oracle(case: Case) -> torch.Tensor:
    facts, (ids,) = case.facts, case.args
    out = torch.zeros(len(ids), facts.width, dtype=torch.float64)
    for row, token in enumerate(ids.tolist()):
        if not facts.partial or facts.first <= token < facts.first + facts.rows:
            out[row] = case.weights["weight"][token - facts.first].double()
    return out


def _embedding_cases(gen: torch.Generator, dtype: str) -> Iterator[Case]:
    for partial in (False, True):
        facts = EmbeddingFacts(dtype, 100, 65, first=100 if partial else 0, partial=partial)
        weight = draw(gen, 100, 65, dtype=dtype)
        for rows in ROWS:
            for kind in (torch.int32, torch.int64):
                ids = torch.randint(0, 300 if partial else 100, (rows,), generator=gen).to(kind)
                yield Case(f"{rows} ids{', partial' if partial else ''}", facts, (ids,), {"weight": weight})
    for width in (1, 64, 66):
        ids = torch.randint(0, 70, (9,), generator=gen)
        yield Case(
            f"{width} wide, tied", EmbeddingFacts(dtype, 70, width, tied=True), (ids,), {"weight": draw(gen, 70, width, dtype=dtype)}
        )
    for rows in ROWS:
        ids = torch.randint(0, 100, (rows,), generator=gen).to(torch.int32)
        weight = draw(gen, 100, 96, dtype=dtype)
        yield Case(f"{rows} ids, tied", EmbeddingFacts(dtype, 100, 96, tied=True), (ids,), {"weight": weight})


EMBEDDING = Op("embedding", EmbeddingReference, _embedding_oracle, lambda case: 0.0, _embedding_cases, by_rows(0), claims=BY_ROW)
