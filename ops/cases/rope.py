"""Truth and inputs of `rope`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from pagoda.ops.cases.common import ROWS, by_rows, draw, strided, tolerance
from pagoda.ops.op import BY_ROW, Case, Op
from pagoda.ops.rope import RopeFacts, RopeReference


def _turn(facts: RopeFacts, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Pairs as complex numbers, multiplied by the angle's."""
    out = x.double().clone()
    half = facts.rotary_dim // 2
    angle = torch.complex(cos.double(), sin.double())
    for i in range(half):
        a, b = (i, i + half) if facts.style == "neox" else (2 * i, 2 * i + 1)
        turned = torch.complex(x[:, :, a].double(), x[:, :, b].double()) * angle[:, i : i + 1]
        out[:, :, a], out[:, :, b] = turned.real, turned.imag
    return out


def _oracle(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, cos, sin = case.args
    return _turn(case.facts, q, cos, sin), _turn(case.facts, k, cos, sin)


def _case(gen: torch.Generator, facts: RopeFacts, label: str, rows: int, heads: tuple[int, int], scale: float = 1.0) -> Case:
    angle = torch.randn(rows, facts.rotary_dim // 2, generator=gen) * 100
    q, k = (draw(gen, rows, h, facts.head_dim, dtype=facts.dtype, scale=scale) for h in heads)
    return Case(label, facts, (q, k, angle.cos(), angle.sin()), consumes=(0, 1))


def _fused(case: Case) -> Case:
    """q and k as slices of one projection, as the model has them."""
    q, k, cos, sin = case.args
    both = torch.cat((q.flatten(1), k.flatten(1)), dim=1)
    q, k = (part.unflatten(1, (-1, case.facts.head_dim)) for part in both.split((q[0].numel(), k[0].numel()), dim=1))
    return Case("slices of one projection", case.facts, (q, k, cos, sin), consumes=(0, 1))


def _cases(gen: torch.Generator, dtype: str) -> Iterator[Case]:
    for style in ("neox", "interleaved"):
        for head_dim, rotary_dim in ((64, 64), (80, 32), (6, 2), (128, 128)):
            facts = RopeFacts(dtype, head_dim, rotary_dim, style)  # type: ignore[arg-type]
            for rows in ROWS[:4]:
                yield _case(gen, facts, f"{style} {rows}×{head_dim}/{rotary_dim}", rows, (9, 3))
            yield _case(gen, facts, f"{style} large", 2, (4, 1), scale=1e4)
            yield _fused(_case(gen, facts, "", 5, (4, 2)))
            q, k, cos, sin = _case(gen, facts, "", 3, (2, 1)).args
            yield Case(f"{style} strided", facts, (strided(q), strided(k), cos, sin), consumes=(0, 1))


ROPE = Op("rope", RopeReference, _oracle, lambda case: tolerance(case.facts.dtype, 2), _cases, by_rows(0, 1, 2, 3), claims=BY_ROW)
