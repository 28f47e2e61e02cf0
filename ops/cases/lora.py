"""Truth and inputs of `lora_delta`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from pagoda.ops.cases.common import ROWS, draw, strided, tolerance
from pagoda.ops.lora import LoraDeltaReference, LoraFacts
from pagoda.ops.op import Case, Op, Part

SHAPES = (
    LoraFacts("", 192, (320,), 1, 8),
    LoraFacts("", 63, (65,), 3, 1),
    LoraFacts("", 128, (64, 32, 32), 2, 16),
    LoraFacts("", 129, (33, 17), 5, 5),
    LoraFacts("", 1, (1,), 2, 4),
    LoraFacts("", 600, (70, 200), 3, 100),
)
"""One linear layer, odd sizes, a stacked q, k, v, a stacked pair, the smallest, a high rank."""


def _oracle(case: Case) -> torch.Tensor:
    facts, (out, x, down, up, slots) = case.facts, case.args
    total = out.double().clone()
    for token, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        start = 0
        for part, size in enumerate(facts.parts):
            factors = down[slot, part * facts.rank : (part + 1) * facts.rank].double()
            low = [float((x[token].double() * row).sum()) for row in factors]
            for r, value in enumerate(low):
                total[token, start : start + size] += value * up[slot, r, start : start + size].double()
            start += size
    return total


def _case(gen: torch.Generator, label: str, dtype: str, shape: LoraFacts, slots: list[int], scale: float = 1.0) -> Case:
    facts, rows = LoraFacts(dtype, shape.in_features, shape.parts, shape.slots, shape.rank), len(slots)
    out = draw(gen, rows, facts.out_features, dtype=dtype)
    x = draw(gen, rows, facts.in_features, dtype=dtype, scale=scale)
    down = draw(gen, *facts.down_shape, dtype=dtype, scale=facts.in_features**-0.5)
    up = draw(gen, *facts.up_shape, dtype=dtype, scale=facts.rank**-0.5)
    return Case(label, facts, (out, x, down, up, torch.tensor(slots, dtype=torch.int32)), mutates=(0,))


def _cases(gen: torch.Generator, dtype: str) -> Iterator[Case]:
    for rows in ROWS:
        for shape in SHAPES:
            slots = torch.randint(-1, shape.slots, (rows,), generator=gen).tolist()
            yield _case(gen, f"{rows} rows of {shape.slots} adapters", dtype, shape, slots)
    for shape in SHAPES:
        yield _case(gen, "nobody has one", dtype, shape, [-1] * 7)
        yield _case(gen, "all have the last", dtype, shape, [shape.slots - 1] * 9)
    yield _case(gen, "segments", dtype, SHAPES[2], [-1] * 5 + [1] * 20 + [0] * 3 + [-1] + [1] * 4)
    yield _case(gen, "many rows", dtype, SHAPES[3], [(7 * i + i // 9) % 6 - 1 for i in range(150)])
    yield _case(gen, "many rows of one", dtype, SHAPES[2], [1] * 90)
    yield _case(gen, "many rows of nobody", dtype, SHAPES[0], [-1] * 70)
    yield _case(gen, "a long prompt", dtype, LoraFacts("", 16, (8, 8), 3, 8), [-1] * 5 + [2] * 2000 + [0] * 60)
    yield _case(gen, "large magnitudes", dtype, SHAPES[0], [0, -1, 0], scale=1e3)
    case = _case(gen, "strided input", dtype, SHAPES[3], [0, 4, -1, 4])
    yield Case(case.label, case.facts, (case.args[0], strided(case.args[1]), *case.args[2:]), mutates=(0,))


def _split(case: Case) -> Iterator[Part]:
    return iter(())


def _tolerance(case: Case) -> float:
    return tolerance(case.facts.dtype, case.facts.in_features + case.facts.rank, 3)


LORA_DELTA = Op("lora_delta", LoraDeltaReference, _oracle, _tolerance, _cases, _split)
