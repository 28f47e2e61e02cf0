"""Truth and inputs of `wkv`: the sums themselves, without their largest exponent taken out."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from pagoda.ops.cases.common import draw, tolerance
from pagoda.ops.cases.state import Array, batch_of, no_parts, numbers, pages_of, uses, walk_of
from pagoda.ops.op import Case, Op
from pagoda.ops.wkv import WkvFacts, WkvReference


def _oracle(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    k, v, decay, first = numbers(case, 4)

    def walk(state: Array, tokens: slice) -> tuple[Array, Array]:
        top = np.where(state[1] > 0, state[2], -np.inf)
        above, below = state[:2] * np.exp(top)
        outputs = []
        for t in range(tokens.start, tokens.stop):
            own, later = np.exp(first + k[t]), np.exp(k[t])
            outputs.append((above + own * v[t]) / (below + own))
            above, below = np.exp(decay) * above + later * v[t], np.exp(decay) * below + later
            top = np.maximum(top + decay, k[t])
        return np.stack(outputs), np.stack([above / np.exp(top), below / np.exp(top), top])

    return walk_of(case.args[5], case.args[4], np.zeros(k.shape), walk)


def _cases(gen: torch.Generator, dtype: str) -> Iterator[Case]:
    for channels, rows in uses((24, 8), [768]):
        batch, tokens = batch_of(rows)
        pages = pages_of(gen, rows, batch, "float32", 3, channels)
        pages[:, 1] = pages[:, 1].abs() + 1.0
        args = (
            draw(gen, tokens, channels, dtype=dtype), draw(gen, tokens, channels, dtype=dtype), -draw(gen, channels).exp(),
            draw(gen, channels), pages, batch,
        )  # fmt: skip
        yield Case(rows.label, WkvFacts(dtype, channels), args, mutates=(4,))


WKV = Op("wkv", WkvReference, _oracle, lambda case: tolerance(case.facts.dtype, 256, roundings=2), _cases, no_parts)
