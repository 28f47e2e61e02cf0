"""Truth and inputs of `gemm_gguf` and `embedding_gguf`; the gguf package says what blocks mean."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import numpy as np
import torch
from pagoda.ops.cases.common import by_rows, draw, strided, tolerance
from pagoda.ops.gguf.decode import decode
from pagoda.ops.gguf.types import GgmlType
from pagoda.ops.linear_gguf import EmbeddingGgufFacts, EmbeddingGgufReference, GemmGgufFacts, GemmGgufReference
from pagoda.ops.op import BY_ROW, Case, Op

HALF_FIELDS: dict[str, tuple[int, ...]] = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "IQ4_NL": (0,),
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "TQ1_0": (52,), "TQ2_0": (64,),
    "IQ1_S": (0,), "IQ2_XXS": (0,), "IQ2_XS": (0,), "IQ2_S": (0,), "IQ3_XXS": (0,), "IQ3_S": (0,), "IQ4_XS": (0,),
    "IQ1_M": (), "MXFP4": (), "NVFP4": (),
}  # fmt: skip
"""Where a block of each format holds float16 scales."""


def draw_blocks(gen: torch.Generator, kind: str, rows: int, elements: int) -> torch.Tensor:
    """Random blocks with scales that keep the numbers near one: uint8 `[rows, row_bytes]`."""
    form = GgmlType[kind]
    blocks = torch.randint(0, 256, (rows, elements // form.block, form.bytes), generator=gen, dtype=torch.uint8)
    for offset in HALF_FIELDS[kind]:
        # float16 of either sign between 2⁻⁷ and 2⁻⁵
        blocks[..., offset + 1] = (blocks[..., offset + 1] & 0x87) | 0x20
    if kind == "IQ1_M":
        blocks[..., 55] = (blocks[..., 55] & 0x8F) | 0x20
        blocks[..., 53] &= 0x7F
    if kind == "MXFP4":
        blocks[..., 0] = 120 + blocks[..., 0] % 8
    if kind == "NVFP4":
        blocks[..., :4] &= 0x3F
    return blocks.flatten(1)


def kinds_here() -> tuple[str, ...]:
    """The formats that this machine can check: those with look-up tables need the gguf package."""
    tables = find_spec("gguf") is not None
    return tuple(kind for kind in HALF_FIELDS if tables or not kind.startswith(("IQ1", "IQ2", "IQ3")))


def true_numbers(blocks: torch.Tensor, kind: str) -> np.ndarray:
    """What the gguf package makes of them, in float64; without it, what our decoders do on the host (their tests compare the two)."""
    if find_spec("gguf") is None:
        return decode(blocks, GgmlType[kind]).double().numpy()
    import gguf

    return gguf.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[kind]).astype(np.float64)


def _gemm_oracle(case: Case) -> torch.Tensor:
    weight = true_numbers(case.weights["weight"], case.facts.kind)
    out = np.einsum("tk,nk->tn", case.args[0].double().numpy(), weight)
    if "bias" in case.weights:
        out = out + case.weights["bias"].double().numpy()
    return torch.from_numpy(out)


def _gemm_case(gen: torch.Generator, dtype: str, kind: str, rows: int, inner: int, outer: int, bias: bool) -> Case:
    weights = {"weight": draw_blocks(gen, kind, outer, inner)}
    if bias:
        weights["bias"] = draw(gen, outer, dtype=dtype)
    label = f"{kind} {rows}×{inner}×{outer}"
    return Case(label, GemmGgufFacts(dtype, kind, inner, outer, bias), (draw(gen, rows, inner, dtype=dtype),), weights)


def _gemm_cases(gen: torch.Generator, dtype: str) -> Iterator[Case]:
    for kind in kinds_here():
        block = GgmlType[kind].block
        for rows, blocks, outer in ((1, 1, 1), (3, 2, 33), (17, 3, 64)):
            yield _gemm_case(gen, dtype, kind, rows, block * blocks, outer, bias=rows == 3)
    yield _gemm_case(gen, dtype, "Q4_1", 0, 64, 16, bias=False)
    case = _gemm_case(gen, dtype, "Q8_0", 5, 576, 96, bias=True)
    yield Case(f"{case.label}, strided rows", case.facts, (strided(case.args[0]),), case.weights)
    for kind in kinds_here():
        yield _gemm_case(gen, dtype, kind, 70, 2 * GgmlType[kind].block, 40, bias=True)


def _gemm_tolerance(case: Case) -> float:
    # Weights are rounded to the computing dtype before the product, hence one rounding more than a plain one.
    return tolerance(case.facts.dtype, case.facts.in_features, roundings=3)


GEMM_GGUF = Op("gemm_gguf", GemmGgufReference, _gemm_oracle, _gemm_tolerance, _gemm_cases, by_rows(0))


def _embedding_oracle(case: Case) -> torch.Tensor:
    facts, (ids,) = case.facts, case.args
    table = true_numbers(case.weights["weight"], facts.kind)
    out = torch.zeros(len(ids), facts.width, dtype=torch.float64)
    for row, token in enumerate(ids.tolist()):
        if not facts.partial or facts.first <= token < facts.first + facts.rows:
            out[row] = torch.from_numpy(table[token - facts.first])
    return out


def _embedding_cases(gen: torch.Generator, dtype: str) -> Iterator[Case]:
    for kind in kinds_here():
        for partial in (False, True):
            width = GgmlType[kind].block * 2
            facts = EmbeddingGgufFacts(dtype, kind, 40, width, first=40 if partial else 0, partial=partial)
            ids = torch.randint(0, 120 if partial else 40, (7,), generator=gen).to(torch.int32 if partial else torch.int64)
            yield Case(f"{kind}{', partial' if partial else ''}", facts, (ids,), {"weight": draw_blocks(gen, kind, 40, width)})
        tied = EmbeddingGgufFacts(dtype, kind, 40, GgmlType[kind].block * 3, tied=True)
        ids = torch.randint(0, 40, (5,), generator=gen)
        yield Case(f"{kind}, tied", tied, (ids,), {"weight": draw_blocks(gen, kind, 40, tied.width)})
    facts = EmbeddingGgufFacts(dtype, "Q8_0", 40, 64, tied=True)
    yield Case("no ids", facts, (torch.empty(0, dtype=torch.int32),), {"weight": draw_blocks(gen, "Q8_0", 40, 64)})


EMBEDDING_GGUF = Op(
    "embedding_gguf", EmbeddingGgufReference, _embedding_oracle, lambda case: tolerance(case.facts.dtype), _embedding_cases,
    by_rows(0), claims=BY_ROW,
)  # fmt: skip
