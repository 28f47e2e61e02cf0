"""Truth and inputs of `moe_mlp_fp8`: those of `moe_mlp`, with matrices drawn as codes and scales."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from pagoda.ops.cases.common import by_rows, draw
from pagoda.ops.cases.linear_fp8 import true_weights
from pagoda.ops.cases.moe import MOE_MLP, routed
from pagoda.ops.linear_fp8 import E4M3
from pagoda.ops.moe import MoeMlpFacts
from pagoda.ops.moe_fp8 import MoeMlpFp8Facts, MoeMlpFp8Reference
from pagoda.ops.op import Case, Op
from pagoda.ops.stored_experts import MATRICES


def _plain(case: Case) -> Case:
    """The case with its numbers in the open."""
    facts: MoeMlpFp8Facts = case.facts
    weights = {name: tensor for name, tensor in case.weights.items() if not name.endswith("_scale")}
    for name in MATRICES:
        weights[name] = torch.from_numpy(np.stack([_matrix(case, name, expert) for expert in range(facts.experts_here)]))
    return replace(case, facts=facts.plain, weights=weights)


def _matrix(case: Case, name: str, expert: int) -> np.ndarray:
    """Gate above up, each with the squares that begin with it."""
    pieces = case.facts.pieces(name)
    codes, scale = case.weights[name][expert], case.weights[f"{name}_scale"][expert]
    outputs, rows = codes.shape[0] // pieces, scale.shape[0] // pieces
    parts = [
        true_weights(codes[i * outputs : (i + 1) * outputs], scale[i * rows : (i + 1) * rows], case.facts.block) for i in range(pieces)
    ]
    return np.concatenate(parts)


def _oracle(case: Case) -> torch.Tensor:
    result: torch.Tensor = MOE_MLP.oracle(_plain(case))
    return result


def _case(gen: torch.Generator, facts: MoeMlpFp8Facts, label: str, rows: int) -> Case:
    weights = {}
    for name in MATRICES:
        experts, outputs, inputs = facts.shape(name)
        codes = draw(gen, experts, outputs, inputs, scale=60.0).clamp(-448, 448)
        codes[..., ::7] *= 1e-3
        weights[name] = codes.to(E4M3)
        weights[f"{name}_scale"] = (torch.rand(facts.scale_shape(name), generator=gen) + 1 / 3) * inputs**-0.5 / 60
        if facts.plain.bias:
            weights[f"{name}_bias"] = draw(gen, experts, outputs, dtype=facts.dtype)
    return Case(label, facts, routed(gen, facts.plain, rows), weights)


def _cases(gen: torch.Generator, dtype: str) -> Iterator[Case]:
    small = MoeMlpFacts(dtype, 8, 64, 96, 2)
    kinds = {
        "gated": small,
        "biased": replace(small, bias=True),
        "plain": replace(small, gated=False),
        "a share": replace(small, first=2, local=3),
        "clamped": replace(small, bias=True, alpha=1.702, limit=1.0),
        "scaled input": replace(small, top_k=1, scale_input=True),
        "odd": replace(small, width=80, hidden=48, experts=5),
        "wide": MoeMlpFacts(dtype, 4, 384, 272, 2),
    }
    for name, plain in kinds.items():
        for block in (0, 128):
            for rows in (0, 1, 17, 70) if name == "wide" else (0, 1, 17):
                facts = MoeMlpFp8Facts(plain, block)
                yield _case(gen, facts, f"{name}, {rows} rows, {f'squares of {block}' if block else 'a scale an output'}", rows)


def _tolerance(case: Case) -> float:
    # Weights are rounded to the computing dtype, hence more than the plain primitive's.
    return 2 * MOE_MLP.tolerance(replace(case, facts=case.facts.plain))


MOE_MLP_FP8 = Op("moe_mlp_fp8", MoeMlpFp8Reference, _oracle, _tolerance, _cases, by_rows(0, 1, 2))
