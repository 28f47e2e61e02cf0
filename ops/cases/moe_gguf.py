"""Truth and inputs of `moe_mlp_gguf`: those of `moe_mlp`, with matrices drawn as blocks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from pagoda.ops.cases.common import by_rows, draw
from pagoda.ops.cases.linear_gguf import draw_blocks, kinds_here, true_numbers
from pagoda.ops.cases.moe import MOE_MLP, routed
from pagoda.ops.moe import MoeMlpFacts
from pagoda.ops.moe_gguf import MoeMlpGgufFacts, MoeMlpGgufReference
from pagoda.ops.op import Case, Op
from pagoda.ops.stored_experts import MATRICES


def _plain(case: Case) -> Case:
    """The case with its numbers in the open."""
    facts: MoeMlpGgufFacts = case.facts
    weights = dict(case.weights)
    for name in MATRICES:
        numbers = true_numbers(weights[name].flatten(0, 1), facts.kind(name).name)
        weights[name] = torch.from_numpy(numbers).view(facts.shape(name))
    return replace(case, facts=facts.plain, weights=weights)


def _oracle(case: Case) -> torch.Tensor:
    result: torch.Tensor = MOE_MLP.oracle(_plain(case))
    return result


def _case(gen: torch.Generator, facts: MoeMlpGgufFacts, label: str, rows: int) -> Case:
    weights = {}
    for name in MATRICES:
        experts, outputs, inputs = facts.shape(name)
        weights[name] = draw_blocks(gen, facts.kind(name).name, experts * outputs, inputs).view(experts, outputs, -1)
        if facts.plain.bias:
            weights[f"{name}_bias"] = draw(gen, experts, outputs, dtype=facts.dtype)
    x, shares, ids = routed(gen, facts.plain, rows)
    # Random blocks of some formats hold hundreds, of others hundredths: inputs that bring gate and up near one suit float16.
    largest = np.abs(true_numbers(weights["up"].flatten(0, 1), facts.up_kind)).max()
    scale = 2.0 ** -round(math.log2(largest * facts.plain.width**0.5 / 2))
    return Case(label, facts, (x * scale, shares, ids), weights)


def _cases(gen: torch.Generator, dtype: str) -> Iterator[Case]:
    for up in kinds_here():
        down = "Q8_0" if up != "Q8_0" else "Q4_1"
        facts = MoeMlpGgufFacts(MoeMlpFacts(dtype, 4, 256, 64, 2), up, down)
        yield _case(gen, facts, f"{up} and {down}, 3 rows", 3)
    plain = MoeMlpFacts(dtype, 8, 64, 96, 2)
    kinds = {
        "gated": plain,
        "biased": replace(plain, bias=True),
        "plain": replace(plain, gated=False),
        "a share": replace(plain, first=2, local=3),
    }
    for name, kind in kinds.items():
        for rows in (0, 1, 17):
            yield _case(gen, MoeMlpGgufFacts(kind, "Q4_0", "Q5_1"), f"{name}, {rows} rows", rows)


def _tolerance(case: Case) -> float:
    # Weights are rounded to the computing dtype, hence more than the plain primitive's.
    return 2 * MOE_MLP.tolerance(replace(case, facts=case.facts.plain))


MOE_MLP_GGUF = Op("moe_mlp_gguf", MoeMlpGgufReference, _oracle, _tolerance, _cases, by_rows(0, 1, 2))
