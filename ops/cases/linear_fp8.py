"""Truth and inputs of `gemm_fp8`."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from pagoda.ops.cases.common import ROWS, by_rows, draw, strided, tolerance
from pagoda.ops.linear_fp8 import E4M3, GemmFp8Facts, GemmFp8Reference
from pagoda.ops.op import Case, Op


def numbers_of(codes: torch.Tensor) -> np.ndarray:
    """What e4m3 codes mean, from their bits: sign, four bits of exponent (bias 7), three of mantissa; float64."""
    bits = codes.contiguous().view(torch.uint8).numpy().astype(np.int64)
    exponent, mantissa = bits >> 3 & 15, bits & 7
    size = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    return np.where(bits & 0x7F == 0x7F, np.nan, np.where(bits & 128, -size, size))


def true_weights(weight: torch.Tensor, scale: torch.Tensor, block: int) -> np.ndarray:
    """Of one matrix, in float64."""
    rows, columns = weight.shape
    scales = scale.double().numpy()
    if not block:
        return numbers_of(weight) * scales[:, None]
    return numbers_of(weight) * scales[np.arange(rows)[:, None] // block, np.arange(columns)[None, :] // block]


def draw_weights(gen: torch.Generator, facts: GemmFp8Facts) -> dict[str, torch.Tensor]:
    """Codes of all sizes, subnormal ones among them, and scales within a factor of four."""
    codes = draw(gen, facts.out_features, facts.in_features, scale=60.0).clamp(-448, 448)
    codes[..., ::7] *= 1e-3
    scale = (torch.rand(facts.scale_shape, generator=gen) + 1 / 3) * facts.in_features**-0.5 / 60
    return {"weight": codes.to(E4M3), "scale": scale}


def _oracle(case: Case) -> torch.Tensor:
    weight = true_weights(case.weights["weight"], case.weights["scale"], case.facts.block)
    out = np.einsum("tk,nk->tn", case.args[0].double().numpy(), weight)
    if "bias" in case.weights:
        out = out + case.weights["bias"].double().numpy()
    return torch.from_numpy(out)


def _case(gen: torch.Generator, label: str, rows: int, facts: GemmFp8Facts, scale: float = 1.0) -> Case:
    weights = draw_weights(gen, facts)
    if facts.bias:
        weights["bias"] = draw(gen, facts.out_features, dtype=facts.dtype)
    x = draw(gen, rows, facts.in_features, dtype=facts.dtype, scale=scale)
    blocks = f", blocks of {facts.block}" if facts.block else ""
    return Case(f"{label}{blocks}", facts, (x,), weights)


def _cases(gen: torch.Generator, dtype: str) -> Iterator[Case]:
    for block in (0, 128):
        for rows in (*ROWS, 64, 70):
            yield _case(gen, f"{rows} rows", rows, GemmFp8Facts(dtype, 256, 320, rows % 2 == 1, block))
        for inner, outer in ((16, 16), (576, 96), (1040, 272), (2048, 48)):
            for rows in (1, 5, 130):
                yield _case(gen, f"{rows}×{inner}×{outer}", rows, GemmFp8Facts(dtype, inner, outer, rows == 5, block))
        yield _case(gen, "large magnitudes", 5, GemmFp8Facts(dtype, 256, 128, False, block), scale=1e3)
        case = _case(gen, "strided rows", 5, GemmFp8Facts(dtype, 256, 128, False, block))
        yield Case(case.label, case.facts, (strided(case.args[0]),), case.weights)


def _tolerance(case: Case) -> float:
    # Weights are rounded to the computing dtype before the product, hence one rounding more than a plain one.
    return tolerance(case.facts.dtype, case.facts.in_features, roundings=3)


GEMM_FP8 = Op("gemm_fp8", GemmFp8Reference, _oracle, _tolerance, _cases, by_rows(0))
