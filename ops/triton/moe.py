"""Experts in Triton: tokens sorted by expert in one launch, gate and up with their activation, down, and the sum over choices.

The order is by expert, then by token, in blocks of rows that belong to one expert, so that each expert that is touched is read once a
block. Nothing depends on how many tokens an expert got: grids are upper bounds, and programs beyond the last block end at once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from pagoda.hal.kernel import PlainKernel
from pagoda.ops.moe import MoeMlpFacts, RouteFacts
from pagoda.ops.triton.launch import fitting_stages

PAIRS = 2048
"""Choices that the sorting kernel looks at in one go."""


@triton.jit
def _route(logits, bias, weights, ids, l_t, scale, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, TOP_K: tl.constexpr, KIND: tl.constexpr,
           RENORMALIZE: tl.constexpr, BIAS: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    expert, place = tl.arange(0, BLOCK), tl.arange(0, BLOCK_K)
    inside = expert < EXPERTS
    x = tl.load(logits + row * l_t + expert, mask=inside, other=float("-inf")).to(tl.float32)
    score = x
    if KIND == "softmax":
        weight = tl.exp(x - tl.max(x, 0))
        score = weight / tl.sum(weight, 0)
    if KIND == "sigmoid":
        score = 1.0 / (1.0 + tl.exp(-x))
    choice = score
    if BIAS:
        choice += tl.load(bias + expert, mask=inside, other=0.0).to(tl.float32)
    choice = tl.where(inside, choice, float("-inf"))
    kept = tl.full([BLOCK_K], float("-inf"), tl.float32)
    chosen = tl.zeros([BLOCK_K], tl.int32)
    for k in tl.static_range(TOP_K):
        best = tl.argmax(choice, 0)
        kept = tl.where(place == k, tl.sum(tl.where(expert == best, score, 0.0), 0), kept)
        chosen = tl.where(place == k, best, chosen)
        choice = tl.where(expert == best, float("-inf"), choice)
    if KIND == "softmax_after":
        kept = tl.exp(kept - tl.max(kept, 0))
        kept = kept / tl.sum(kept, 0)
    kept = tl.where(place < TOP_K, kept, 0.0)
    if RENORMALIZE:
        kept = kept / (tl.sum(kept, 0) + 1e-20)
    tl.store(weights + row * TOP_K + place, kept * scale, mask=place < TOP_K)
    tl.store(ids + row * TOP_K + place, chosen.to(tl.int64), mask=place < TOP_K)


class Route(PlainKernel):
    """`run(logits, bias)`, as in `ops.moe.RouteReference` where experts have no groups."""

    facts: RouteFacts

    def run(self, logits: torch.Tensor, bias: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        facts, rows = self.facts, logits.shape[0]
        logits = logits if logits.stride(-1) == 1 else logits.contiguous()
        weights = torch.empty(rows, facts.top_k, dtype=torch.float32, device=logits.device)
        ids = torch.empty(rows, facts.top_k, dtype=torch.int64, device=logits.device)
        if rows:
            _route[(rows,)](
                logits, logits if bias is None else bias, weights, ids, logits.stride(0), facts.scale, EXPERTS=facts.experts,
                BLOCK=triton.next_power_of_2(facts.experts), TOP_K=facts.top_k, KIND=facts.score, RENORMALIZE=facts.renormalize,
                BIAS=bias is not None, BLOCK_K=triton.next_power_of_2(facts.top_k), num_warps=1,
            )  # fmt: skip
        return weights, ids


@triton.jit(do_not_specialize=["pairs", "first", "blocks"])
def _sort(ids, order, owner, pairs, first, blocks, EXPERTS: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr,
          ROWS: tl.constexpr):  # fmt: skip
    """Program e writes the choices of expert e, in order, padded with `pairs` to whole blocks; `owner` gets each block's expert."""
    expert = tl.program_id(0)
    bins = tl.arange(0, BINS)
    counts = tl.zeros([BINS], tl.int32)
    for start in range(0, pairs, BLOCK):
        pair = start + tl.arange(0, BLOCK)
        mine = tl.load(ids + pair, mask=pair < pairs, other=-1).to(tl.int32) - first
        local = (pair < pairs) & (mine >= 0) & (mine < EXPERTS)
        counts += tl.histogram(tl.where(local, mine, 0), BINS, mask=local)
    padded = (counts + ROWS - 1) // ROWS * ROWS
    offset = tl.sum(tl.where(bins < expert, padded, 0), 0)
    count = tl.sum(tl.where(bins == expert, counts, 0), 0)
    size = tl.sum(tl.where(bins == expert, padded, 0), 0)
    done = offset
    for start in range(0, pairs, BLOCK):
        pair = start + tl.arange(0, BLOCK)
        mine = tl.load(ids + pair, mask=pair < pairs, other=-1).to(tl.int32) - first
        here = ((pair < pairs) & (mine == expert)).to(tl.int32)
        tl.store(order + done + tl.cumsum(here, 0) - 1, pair, mask=here > 0)
        done += tl.sum(here, 0)
    spare = tl.arange(0, ROWS)
    tl.store(order + offset + count + spare, tl.zeros([ROWS], tl.int32) + pairs, mask=count + spare < size)
    for block in range(offset // ROWS, (offset + size) // ROWS):
        tl.store(owner + block, expert)
    if expert == EXPERTS - 1:
        # The blocks beyond the last belong to nobody.
        for block in range((offset + size) // ROWS, blocks):
            tl.store(owner + block, -1)


@triton.jit
def activated(gate, up, alpha, limit, KIND: tl.constexpr):
    if KIND == "clamped":
        gate, up = tl.minimum(gate, limit), tl.minimum(tl.maximum(up, -limit), limit)
        return gate / (1.0 + tl.exp(-alpha * gate)) * (up + 1.0)
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit(do_not_specialize=["pairs"])
def _up(x, weight, bias, scales, order, owner, hidden, pairs, x_t, alpha, limit, WIDTH: tl.constexpr, HIDDEN: tl.constexpr,
        TOP_K: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, KIND: tl.constexpr, BIAS: tl.constexpr,
        SCALE: tl.constexpr):  # fmt: skip
    """`act(x · gateᵀ, x · upᵀ)` of one block of choices and some hidden numbers."""
    block, tile = tl.program_id(1), tl.program_id(0)
    expert = tl.load(owner + block).to(tl.int64)
    if expert < 0:
        return
    pair = tl.load(order + block * ROWS + tl.arange(0, ROWS))
    valid = pair < pairs
    n, k = tile * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    a = x + (pair // TOP_K).to(tl.int64)[:, None] * x_t + k[None, :]
    b = weight + expert * (2 * HIDDEN * WIDTH) + n[None, :] * WIDTH + k[:, None]
    gate = tl.zeros([ROWS, BLOCK_N], tl.float32)
    up = tl.zeros([ROWS, BLOCK_N], tl.float32)
    for start in range(0, WIDTH, BLOCK_K):
        left = tl.load(a + start, mask=valid[:, None] & (start + k < WIDTH)[None, :], other=0.0)
        mask = (n < HIDDEN)[None, :] & (start + k < WIDTH)[:, None]
        gate = tl.dot(left, tl.load(b + start, mask=mask, other=0.0), gate, input_precision="ieee")
        up = tl.dot(left, tl.load(b + HIDDEN * WIDTH + start, mask=mask, other=0.0), up, input_precision="ieee")
    if SCALE:
        scale = tl.load(scales + pair, mask=valid, other=0.0).to(tl.float32)[:, None]
        gate, up = gate * scale, up * scale
    if BIAS:
        biases = bias + expert * (2 * HIDDEN) + n
        gate += tl.load(biases, mask=n < HIDDEN, other=0.0).to(tl.float32)[None, :]
        up += tl.load(biases + HIDDEN, mask=n < HIDDEN, other=0.0).to(tl.float32)[None, :]
    result = activated(gate, up, alpha, limit, KIND).to(hidden.dtype.element_ty)
    tl.store(hidden + pair.to(tl.int64)[:, None] * HIDDEN + n[None, :], result, mask=valid[:, None] & (n < HIDDEN)[None, :])


@triton.jit(do_not_specialize=["pairs"])
def _down(hidden, weight, bias, scales, order, owner, out, pairs, WIDTH: tl.constexpr, HIDDEN: tl.constexpr, ROWS: tl.constexpr,
          BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BIAS: tl.constexpr, SCALE: tl.constexpr):  # fmt: skip
    """Each choice's result, with its weight."""
    block, tile = tl.program_id(1), tl.program_id(0)
    expert = tl.load(owner + block).to(tl.int64)
    if expert < 0:
        return
    pair = tl.load(order + block * ROWS + tl.arange(0, ROWS))
    valid = pair < pairs
    n, k = tile * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    a = hidden + pair.to(tl.int64)[:, None] * HIDDEN + k[None, :]
    b = weight + expert * (WIDTH * HIDDEN) + n[None, :] * HIDDEN + k[:, None]
    acc = tl.zeros([ROWS, BLOCK_N], tl.float32)
    for start in range(0, HIDDEN, BLOCK_K):
        left = tl.load(a + start, mask=valid[:, None] & (start + k < HIDDEN)[None, :], other=0.0)
        right = tl.load(b + start, mask=(n < WIDTH)[None, :] & (start + k < HIDDEN)[:, None], other=0.0)
        acc = tl.dot(left, right, acc, input_precision="ieee")
    if BIAS:
        acc += tl.load(bias + expert * WIDTH + n, mask=n < WIDTH, other=0.0).to(tl.float32)[None, :]
    if SCALE:
        acc *= tl.load(scales + pair, mask=valid, other=0.0).to(tl.float32)[:, None]
    tl.store(out + pair.to(tl.int64)[:, None] * WIDTH + n[None, :], acc, mask=valid[:, None] & (n < WIDTH)[None, :])


@triton.jit(do_not_specialize=["first"])
def _sum(parts, ids, out, first, WIDTH: tl.constexpr, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """A token's result: the sum over its choices that are on this rank, in their order."""
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for choice in range(TOP_K):
        expert = tl.load(ids + token * TOP_K + choice) - first
        here = (expert >= 0) & (expert < EXPERTS)
        total += tl.load(parts + (token * TOP_K + choice) * WIDTH + n, mask=(n < WIDTH) & here, other=0.0)
    tl.store(out + token * WIDTH + n, total.to(out.dtype.element_ty), mask=n < WIDTH)


class _Tile(NamedTuple):
    """Rows of a block of choices, columns and inner numbers of a program's tile."""

    rows: int
    up: tuple[int, int]
    down: tuple[int, int]
    warps: int
    stages: int


def _tile(choices_an_expert: float) -> _Tile:
    """Small blocks where experts have few tokens: reading weights is all the work there."""
    if choices_an_expert <= 8:
        return _Tile(16, (32, 128), (32, 128), 4, 4)
    if choices_an_expert <= 32:
        return _Tile(32, (64, 64), (64, 64), 4, 4)
    return _Tile(64, (64, 64), (128, 64), 4, 4) if choices_an_expert <= 96 else _Tile(128, (128, 64), (128, 64), 8, 3)


def kind_of(facts: MoeMlpFacts) -> str:
    """Of the activation, as the kernels name it."""
    return "clamped" if facts.limit is not None and facts.alpha is not None else "silu"


def sort_choices(facts: MoeMlpFacts, ids: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Choices by expert in blocks of `rows`, and the expert of each block that there can be, −1 for those that there are not."""
    pairs, local = ids.numel(), facts.local or facts.experts
    blocks = min(pairs, local + pairs // rows)
    order = torch.empty(blocks * rows, dtype=torch.int32, device=ids.device)
    owner = torch.empty(blocks, dtype=torch.int32, device=ids.device)
    _sort[(local,)](
        ids, order, owner, pairs, facts.first, blocks, EXPERTS=local, BINS=triton.next_power_of_2(local),
        BLOCK=min(PAIRS, max(128, triton.next_power_of_2(pairs))), ROWS=rows, num_warps=4,
    )  # fmt: skip
    return order, owner


def sum_choices(facts: MoeMlpFacts, parts: torch.Tensor, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What the choices of each token come to."""
    out = torch.empty(ids.shape[0], facts.width, dtype=dtype, device=parts.device)
    _sum[(ids.shape[0], triton.cdiv(facts.width, 1024))](
        parts, ids, out, facts.first, WIDTH=facts.width, EXPERTS=facts.local or facts.experts, TOP_K=facts.top_k, BLOCK=1024
    )  # fmt: skip
    return out


class MoeMlp(PlainKernel):
    """`run(packed, x, weights, ids)`, as in `ops.moe.MoeMlpReference` for gated experts."""

    facts: MoeMlpFacts

    def run(self, packed: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        facts, tokens = self.facts, x.shape[0]
        if tokens == 0:
            return torch.empty(0, facts.width, dtype=x.dtype, device=x.device)
        x, ids, weights = x if x.stride(-1) == 1 else x.contiguous(), ids.contiguous(), weights.contiguous()
        pairs = ids.numel()
        tile = self._tile(pairs, x.device)
        order, owner = sort_choices(facts, ids, tile.rows)
        hidden = torch.empty(pairs, facts.hidden, dtype=x.dtype, device=x.device)
        parts = torch.empty(pairs, facts.width, dtype=torch.float32, device=x.device)
        bias = (packed["up_bias"], packed["down_bias"]) if facts.bias else (x, x)
        common = {"ROWS": tile.rows, "BIAS": facts.bias, "num_warps": tile.warps, "num_stages": tile.stages}
        sizes = {"WIDTH": facts.width, "HIDDEN": facts.hidden}
        _up[(triton.cdiv(facts.hidden, tile.up[0]), len(owner))](
            x, packed["up"], bias[0], weights, order, owner, hidden, pairs, x.stride(0), facts.alpha or 0.0, facts.limit or 0.0, **sizes,
            TOP_K=facts.top_k, BLOCK_N=tile.up[0], BLOCK_K=tile.up[1], KIND=kind_of(facts), SCALE=facts.scale_input, **common,
        )  # fmt: skip
        _down[(triton.cdiv(facts.width, tile.down[0]), len(owner))](
            hidden, packed["down"], bias[1], weights, order, owner, parts, pairs, **sizes, BLOCK_N=tile.down[0], BLOCK_K=tile.down[1],
            SCALE=not facts.scale_input, **common,
        )  # fmt: skip
        return sum_choices(facts, parts, ids, x.dtype)

    def _tile(self, pairs: int, device: torch.device) -> _Tile:
        return self._fitting(_tile(pairs / self.facts.experts), device)

    def _fitting(self, tile: _Tile, device: torch.device) -> _Tile:
        """The tile with as many of its stages as a program's shared memory holds: AMD has 64 KiB."""
        stage = (tile.rows + 2 * tile.up[0]) * tile.up[1] * (4 if self.facts.dtype == "float32" else 2)  # both halves of the weights
        return tile._replace(stages=fitting_stages(device, tile.stages, stage))


class MoeMlpFixed(MoeMlp):
    """The same with one tile for any number of choices: a token's sums are taken in one order, whoever else is there."""

    def _tile(self, pairs: int, device: torch.device) -> _Tile:
        return self._fitting(_Tile(64, (64, 64), (64, 64), 4, 4 if self.facts.dtype != "float32" else 2), device)
