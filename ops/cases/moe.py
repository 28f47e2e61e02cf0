"""Truth and inputs of `route` and `moe_mlp`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from pagoda.ops.cases.activation import act
from pagoda.ops.cases.common import by_rows, draw, tolerance
from pagoda.ops.moe import MoeMlpFacts, MoeMlpReference, RouteFacts, RouteReference
from pagoda.ops.op import BY_ROW, Case, Op


def _scores(facts: RouteFacts, logits: np.ndarray) -> np.ndarray:
    if facts.score == "softmax":
        weights = np.exp(logits - logits.max())
        return np.asarray(weights / weights.sum())
    return 1 / (1 + np.exp(-logits)) if facts.score == "sigmoid" else logits


def _allowed(facts: RouteFacts, choice: np.ndarray) -> list[int]:
    size = facts.experts // facts.groups
    members = [list(range(g * size, (g + 1) * size)) for g in range(facts.groups)]
    best = 1 if facts.group_score == "max" else 2
    worth = [sum(sorted((choice[e] for e in group), reverse=True)[:best]) for group in members]
    order = sorted(range(facts.groups), key=lambda g: -worth[g])[: facts.top_groups]
    return [e for g in order for e in members[g]]


def _route_oracle(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    facts, logits = case.facts, case.args[0].double().numpy()
    bias = case.args[1].double().numpy() if case.args[1] is not None else np.zeros(facts.experts)
    weights, ids = np.zeros((len(logits), facts.top_k)), np.zeros((len(logits), facts.top_k), dtype=np.int64)
    for row, line in enumerate(logits):
        if facts.score == "sparsemixer":
            weights[row], ids[row] = _mixed(facts, line)
            continue
        scores = _scores(facts, line)
        choice = scores + bias
        chosen = sorted(_allowed(facts, choice), key=lambda e: -choice[e])[: facts.top_k]
        kept = scores[chosen]
        if facts.score == "softmax_after":
            kept = np.exp(kept - kept.max()) / np.exp(kept - kept.max()).sum()
        weights[row], ids[row] = (kept / kept.sum() if facts.renormalize else kept) * facts.scale, chosen
    return torch.from_numpy(weights), torch.from_numpy(ids)


def _mixed(facts: RouteFacts, logits: np.ndarray) -> tuple[list[float], list[int]]:
    chosen, weights = [], []
    for _ in range(facts.top_k):
        left = [e for e in range(facts.experts) if e not in chosen]
        best = max(left, key=lambda e: logits[e])
        near = [e for e in left if logits[best] - logits[e] <= 2 * facts.jitter * max(abs(logits[e]), logits[best])]
        weights.append(float(facts.scale / sum(np.exp(logits[e] - logits[best]) for e in near)))
        chosen.append(best)
    return weights, chosen


def _distinct(gen: torch.Generator, rows: int, experts: int, dtype: str) -> torch.Tensor:
    """Logits without ties, exact in every dtype: which expert wins a tie is nobody's business."""
    order = [torch.randperm(experts, generator=gen) for _ in range(rows)]
    return ((torch.stack(order) if rows else torch.zeros(0, experts)) / 8.0 - experts / 16).to(getattr(torch, dtype))


def _route_cases(gen: torch.Generator, dtype: str) -> Iterator[Case]:
    kinds = (
        RouteFacts(dtype, 8, 2), RouteFacts(dtype, 60, 4, "softmax_after"), RouteFacts(dtype, 128, 8, renormalize=True),
        RouteFacts(dtype, 16, 1, "sigmoid"), RouteFacts(dtype, 64, 6, "softmax", False, 8, 3, scale=16.0),
        RouteFacts(dtype, 64, 8, "sigmoid", True, 8, 4, "top2", True, 2.5), RouteFacts(dtype, 4, 4),
        RouteFacts(dtype, 16, 2, "sparsemixer", jitter=0.17),
    )  # fmt: skip
    for facts in kinds:
        for rows in (0, 1, 5, 33):
            bias = draw(gen, facts.experts, scale=0.3) if facts.bias else None
            yield Case(f"{rows} rows", facts, (_distinct(gen, rows, facts.experts, dtype), bias))


ROUTE = Op(
    "route", RouteReference, _route_oracle, lambda case: tolerance("float32", case.facts.experts, roundings=4), _route_cases,
    by_rows(0), claims=BY_ROW,
)  # fmt: skip


def _moe_oracle(case: Case) -> torch.Tensor:
    facts = case.facts
    x, chosen = case.args[0].double().numpy(), case.args[2].tolist()
    packed = {name: tensor.double().numpy() for name, tensor in case.weights.items()}
    out = np.zeros(x.shape)
    for token, ids in enumerate(chosen):
        for place, expert in enumerate(ids):
            local, weight = expert - facts.first, float(case.args[1][token, place])
            if not 0 <= local < (facts.local or facts.experts):
                continue
            result = _expert(facts, packed, local, x[token] * weight if facts.scale_input else x[token])
            out[token] += result if facts.scale_input else result * weight
    return torch.from_numpy(out)


def _expert(facts: MoeMlpFacts, packed: dict[str, np.ndarray], expert: int, x: np.ndarray) -> np.ndarray:
    hidden = packed["up"][expert] @ x + (packed["up_bias"][expert] if facts.bias else 0)
    if facts.gated:
        gate, up = hidden[: facts.hidden], hidden[facts.hidden :]
        if facts.limit is not None and facts.alpha is not None:
            gate, up = np.minimum(gate, facts.limit), np.clip(up, -facts.limit, facts.limit)
            hidden = gate / (1 + np.exp(-facts.alpha * gate)) * (up + 1)
        else:
            hidden = act(facts.activation, gate) * up
    else:
        hidden = act(facts.activation, hidden)
    result: np.ndarray = packed["down"][expert] @ hidden + (packed["down_bias"][expert] if facts.bias else 0)
    return result


def _moe_cases(gen: torch.Generator, dtype: str) -> Iterator[Case]:
    base = MoeMlpFacts(dtype, 8, 48, 40, 2)
    kinds = {
        "gated": base, "plain": replace(base, gated=False, activation="relu2"), "biased": replace(base, bias=True),
        "clamped": replace(base, bias=True, alpha=1.702, limit=1.0), "a rank's share": replace(base, first=2, local=3),
        "scaled input": replace(base, top_k=1, scale_input=True), "all experts": replace(base, experts=3, top_k=3),
    }  # fmt: skip
    for name, facts in kinds.items():
        # Hundreds of choices an expert go another way than few: in larger blocks, sorted by several programs.
        for rows in (0, 1, 4, 33, *((1100,) if name in ("biased", "a rank's share") else ())):
            yield _moe_case(gen, facts, f"{name}, {rows} rows", rows)
    # Few tokens of many experts, whose choices are hardly ever the same; rows longer than a tile.
    few = replace(base, bias=True, top_k=3)
    for facts, rows in (
        (replace(few, experts=6, width=1100, hidden=30), 1),
        (replace(few, experts=6, width=50, hidden=1100), 1),
        (replace(few, experts=64), 2),
        (replace(few, experts=64, first=10, local=30, scale_input=True), 2),
        (replace(few, experts=64, first=10, local=30, alpha=1.702, limit=1.0), 2),
    ):
        yield _moe_case(gen, facts, f"few tokens, {facts.experts} experts of {facts.width} × {facts.hidden}", rows)


def _moe_case(gen: torch.Generator, facts: MoeMlpFacts, label: str, rows: int) -> Case:
    local, up = facts.local or facts.experts, facts.hidden * (2 if facts.gated else 1)
    weights = {
        "up": draw(gen, local, up, facts.width, dtype=facts.dtype, scale=facts.width**-0.5),
        "down": draw(gen, local, facts.width, facts.hidden, dtype=facts.dtype, scale=facts.hidden**-0.5),
    }
    if facts.bias:
        weights |= {"up_bias": draw(gen, local, up, dtype=facts.dtype), "down_bias": draw(gen, local, facts.width, dtype=facts.dtype)}
    return Case(label, facts, routed(gen, facts, rows), weights)


def routed(gen: torch.Generator, facts: MoeMlpFacts, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, and the weights and ids of the experts that they chose."""
    order = [torch.randperm(facts.experts, generator=gen)[: facts.top_k] for _ in range(rows)]
    ids = torch.stack(order) if rows else torch.zeros(0, facts.top_k, dtype=torch.int64)
    return draw(gen, rows, facts.width, dtype=facts.dtype), torch.rand(rows, facts.top_k, generator=gen), ids


def _moe_tolerance(case: Case) -> float:
    # Rounded: the scaled input, gate and up, the activation, their product, the expert's output, the result.
    return tolerance(case.facts.dtype, case.facts.width + case.facts.hidden, roundings=5)


MOE_MLP = Op("moe_mlp", MoeMlpReference, _moe_oracle, _moe_tolerance, _moe_cases, by_rows(0, 1, 2))
