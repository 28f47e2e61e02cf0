"""Experts in Triton: choices sorted by expert, gate and up with their activation, down, and the sum over choices.

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
from pagoda.ops.triton.launch import describes, early, fitting_stages
from pagoda.ops.triton.moe_activation import activated, kind_of
from pagoda.ops.triton.moe_few import choices_apart, few_alike
from pagoda.ops.triton.moe_sort import sort_choices
from pagoda.ops.triton.order import let_next_start, wait_for_last
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor


@triton.jit
def _route(logits, bias, weights, ids, l_t, scale, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, TOP_K: tl.constexpr, KIND: tl.constexpr,
           RENORMALIZE: tl.constexpr, BIAS: tl.constexpr, BLOCK_K: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    let_next_start(EARLY)
    wait_for_last(EARLY)
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
                BIAS=bias is not None, BLOCK_K=triton.next_power_of_2(facts.top_k), num_warps=1, **early(logits.device, rows),
            )  # fmt: skip
        return weights, ids


@triton.jit
def _gate_up(x, weight, bias, scales, order, hidden, expert, block, tile, pairs, x_t, alpha, limit, WIDTH: tl.constexpr,
             HIDDEN: tl.constexpr, TOP_K: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
             BLOCK_K: tl.constexpr, KIND: tl.constexpr, BIAS: tl.constexpr, SCALE: tl.constexpr, DESCRIBED: tl.constexpr,
             EARLY: tl.constexpr):  # fmt: skip
    """The first ROWS of a block of SIZE choices."""
    pair = tl.load(order + block * SIZE + tl.arange(0, ROWS))
    valid = pair < pairs
    n, k = tile * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    a = x + (pair // TOP_K).to(tl.int64)[:, None] * x_t + k[None, :]
    if DESCRIBED:
        # Both halves in one product, which reads the left side once.
        both = tl.zeros([ROWS, 2 * BLOCK_N], tl.float32)
        for start in range(0, WIDTH, BLOCK_K):
            left = tl.load(a + start, mask=valid[:, None] & (start + k < WIDTH)[None, :], other=0.0)
            right = weight.load([expert.to(tl.int32) * 2, tile * BLOCK_N, start]).reshape(2 * BLOCK_N, BLOCK_K)
            both = tl.dot(left, tl.trans(right), both, input_precision="ieee")
        gate, up = tl.split(tl.permute(both.reshape(ROWS, 2, BLOCK_N), 0, 2, 1))
    else:
        b = weight + expert * (2 * HIDDEN * WIDTH) + n[None, :] * WIDTH + k[:, None]
        gate = tl.zeros([ROWS, BLOCK_N], tl.float32)
        up = tl.zeros([ROWS, BLOCK_N], tl.float32)
        for start in range(0, WIDTH, BLOCK_K):
            left = tl.load(a + start, mask=valid[:, None] & (start + k < WIDTH)[None, :], other=0.0)
            mask = (n < HIDDEN)[None, :] & (start + k < WIDTH)[:, None]
            gate = tl.dot(left, tl.load(b + start, mask=mask, other=0.0), gate, input_precision="ieee")
            up = tl.dot(left, tl.load(b + HIDDEN * WIDTH + start, mask=mask, other=0.0), up, input_precision="ieee")
    if EARLY:
        # Not before: who waits takes the room of programs that have not begun.
        gdc_launch_dependents()
    if SCALE:
        scale = tl.load(scales + pair, mask=valid, other=0.0).to(tl.float32)[:, None]
        gate, up = gate * scale, up * scale
    if BIAS:
        biases = bias + expert * (2 * HIDDEN) + n
        gate += tl.load(biases, mask=n < HIDDEN, other=0.0).to(tl.float32)[None, :]
        up += tl.load(biases + HIDDEN, mask=n < HIDDEN, other=0.0).to(tl.float32)[None, :]
    result = activated(gate, up, alpha, limit, KIND).to(hidden.dtype.element_ty)
    place = (block * SIZE + tl.arange(0, ROWS)).to(tl.int64)
    tl.store(hidden + place[:, None] * HIDDEN + n[None, :], result, mask=(n < HIDDEN)[None, :])


@triton.jit(do_not_specialize=["pairs"])
def _up(x, weight, bias, scales, order, owner, hidden, pairs, x_t, alpha, limit, WIDTH: tl.constexpr, HIDDEN: tl.constexpr,
        TOP_K: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, KIND: tl.constexpr, BIAS: tl.constexpr,
        SCALE: tl.constexpr, DESCRIBED: tl.constexpr, HALVES: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """`act(x · gateᵀ, x · upᵀ)` of one block of choices and some hidden numbers. DESCRIBED: weights are `[experts × 2, HIDDEN, WIDTH]`."""
    if EARLY:
        gdc_wait()
    block, tile = tl.program_id(1), tl.program_id(0)
    expert = tl.load(owner + block).to(tl.int64)
    if expert < 0:
        return
    half = False
    if HALVES:
        half = tl.load(order + block * ROWS + ROWS // 2) >= pairs
    if half:  # an expert's last choices
        _gate_up(x, weight, bias, scales, order, hidden, expert, block, tile, pairs, x_t, alpha, limit, WIDTH, HIDDEN, TOP_K, ROWS,
                 ROWS // 2, BLOCK_N, BLOCK_K, KIND, BIAS, SCALE, DESCRIBED, EARLY)  # fmt: skip
    else:
        _gate_up(x, weight, bias, scales, order, hidden, expert, block, tile, pairs, x_t, alpha, limit, WIDTH, HIDDEN, TOP_K, ROWS, ROWS,
                 BLOCK_N, BLOCK_K, KIND, BIAS, SCALE, DESCRIBED, EARLY)  # fmt: skip


@triton.jit
def _outputs(hidden, weight, bias, scales, order, out, expert, block, tile, pairs, WIDTH: tl.constexpr, HIDDEN: tl.constexpr,
             SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BIAS: tl.constexpr, SCALE: tl.constexpr,
             DESCRIBED: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """The first ROWS of a block of SIZE choices."""
    pair = tl.load(order + block * SIZE + tl.arange(0, ROWS))
    valid = pair < pairs
    n, k = tile * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    if not DESCRIBED:
        a = hidden + (block * SIZE + tl.arange(0, ROWS)).to(tl.int64)[:, None] * HIDDEN + k[None, :]
        b = weight + expert * (WIDTH * HIDDEN) + n[None, :] * HIDDEN + k[:, None]
    acc = tl.zeros([ROWS, BLOCK_N], tl.float32)
    for start in range(0, HIDDEN, BLOCK_K):
        if DESCRIBED:
            left = hidden.load([block * SIZE, start])
            right = tl.trans(weight.load([expert.to(tl.int32), tile * BLOCK_N, start]).reshape(BLOCK_N, BLOCK_K))
        else:
            left = tl.load(a + start, mask=(start + k < HIDDEN)[None, :], other=0.0)
            right = tl.load(b + start, mask=(n < WIDTH)[None, :] & (start + k < HIDDEN)[:, None], other=0.0)
        acc = tl.dot(left, right, acc, input_precision="ieee")
    if EARLY:
        gdc_launch_dependents()
    if BIAS:
        acc += tl.load(bias + expert * WIDTH + n, mask=n < WIDTH, other=0.0).to(tl.float32)[None, :]
    if SCALE:
        acc *= tl.load(scales + pair, mask=valid, other=0.0).to(tl.float32)[:, None]
    tl.store(out + pair.to(tl.int64)[:, None] * WIDTH + n[None, :], acc, mask=valid[:, None] & (n < WIDTH)[None, :])


@triton.jit(do_not_specialize=["pairs"])
def _down(hidden, halves, weight, bias, scales, order, owner, out, pairs, WIDTH: tl.constexpr, HIDDEN: tl.constexpr, ROWS: tl.constexpr,
          BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BIAS: tl.constexpr, SCALE: tl.constexpr,
          DESCRIBED: tl.constexpr, HALVES: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """Each choice's result, with its weight. DESCRIBED: weights are `[experts, WIDTH, HIDDEN]`, `hidden` and `halves` bring a block's rows
    and the first half of them."""
    if EARLY:
        gdc_wait()
    block, tile = tl.program_id(1), tl.program_id(0)
    expert = tl.load(owner + block).to(tl.int64)
    if expert < 0:
        return
    half = False
    if HALVES:
        half = tl.load(order + block * ROWS + ROWS // 2) >= pairs
    if half:
        _outputs(halves, weight, bias, scales, order, out, expert, block, tile, pairs, WIDTH, HIDDEN, ROWS, ROWS // 2, BLOCK_N, BLOCK_K,
                 BIAS, SCALE, DESCRIBED, EARLY)  # fmt: skip
    else:
        _outputs(hidden, weight, bias, scales, order, out, expert, block, tile, pairs, WIDTH, HIDDEN, ROWS, ROWS, BLOCK_N, BLOCK_K, BIAS,
                 SCALE, DESCRIBED, EARLY)  # fmt: skip


@triton.jit(do_not_specialize=["first"])
def _sum(parts, ids, out, first, WIDTH: tl.constexpr, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr,
         EARLY: tl.constexpr):  # fmt: skip
    """A token's result: the sum over its choices that are on this rank, in their order."""
    let_next_start(EARLY)
    wait_for_last(EARLY)
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for choice in range(TOP_K):
        expert = tl.load(ids + token * TOP_K + choice) - first
        here = (expert >= 0) & (expert < EXPERTS)
        total += tl.load(parts + (token * TOP_K + choice) * WIDTH + n, mask=(n < WIDTH) & here, other=0.0)
    tl.store(out + token * WIDTH + n, total.to(out.dtype.element_ty), mask=n < WIDTH)


class Cut(NamedTuple):
    """Columns and inner numbers of a program's tile; `described`: weights come through descriptors, gate and up in one product."""

    columns: int
    inner: int
    warps: int = 4
    stages: int = 4
    described: bool = False


class MoeTile(NamedTuple):
    """Rows of a block of choices, and how up and down are cut."""

    rows: int
    up: Cut
    down: Cut


def moe_tile(choices_an_expert: float, described: bool = False) -> MoeTile:
    """Small blocks where experts have few tokens: reading weights is all the work there. `described`: the device and dtype can.
    (`benchmarks/gpu_share.py --only bf16-experts --tiles` measures the choices.)"""
    if choices_an_expert <= 8:
        return MoeTile(16, Cut(32, 256, 4, 3), Cut(64, 128, 4, 3))
    if choices_an_expert <= 24:
        return MoeTile(32, Cut(64, 128, 4, 3, True), Cut(128, 128, 4, 2, True)) if described else MoeTile(32, Cut(64, 64), Cut(64, 64))
    if choices_an_expert <= 96:
        return MoeTile(64, Cut(64, 64), Cut(128, 64, 4, 3, True) if described else Cut(128, 64))
    return MoeTile(128, Cut(128, 64, 8, 3, True), Cut(256, 64, 8, 4, True)) if described else MoeTile(128, *[Cut(128, 64, 8, 3)] * 2)


def float32_tile(rows: int) -> MoeTile:
    """Where no matrix units multiply the numbers, threads hold the operands: with more of a step they spill into memory."""
    return MoeTile(rows, Cut(32, 16, 4, 2), Cut(32, 16, 4, 2))


HALVED = True
"""Whether an expert's last choices are half a block where they are no more, and blocks are large."""

FIXED = MoeTile(64, Cut(64, 64), Cut(64, 64))
"""For any number of choices, so that a token's sums are taken in one order."""


def sum_choices(facts: MoeMlpFacts, parts: torch.Tensor, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What the choices of each token come to."""
    out = torch.empty(ids.shape[0], facts.width, dtype=dtype, device=parts.device)
    _sum[(ids.shape[0], triton.cdiv(facts.width, 1024))](
        parts, ids, out, facts.first, WIDTH=facts.width, EXPERTS=facts.local or facts.experts, TOP_K=facts.top_k, BLOCK=1024,
        **early(parts.device),
    )  # fmt: skip
    return out


class MoeMlp(PlainKernel):
    """`run(packed, x, weights, ids)`, as in `ops.moe.MoeMlpReference` for gated experts."""

    facts: MoeMlpFacts

    def run(self, packed: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == 0:
            return torch.empty(0, self.facts.width, dtype=x.dtype, device=x.device)
        if self._apart(x.shape[0]):
            x = x if x.stride(-1) == 1 else x.contiguous()
            return choices_apart(self.facts, packed, x, weights.contiguous(), ids.contiguous())
        return self.in_tiles(packed, x, weights, ids, self._tile(ids.numel(), x.device))

    def _apart(self, tokens: int) -> bool:
        return few_alike(self.facts, tokens)

    def in_tiles(self, packed: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, tile: MoeTile) -> torch.Tensor:
        """The same cut as `tile` says."""
        facts = self.facts
        x, ids, weights = x if x.stride(-1) == 1 else x.contiguous(), ids.contiguous(), weights.contiguous()
        pairs = ids.numel()
        order, owner = sort_choices(facts, ids, tile.rows)
        # In the order of the blocks, with their padding, so that down reads whole blocks.
        hidden = torch.empty(len(order), facts.hidden, dtype=x.dtype, device=x.device)
        parts = torch.empty(pairs, facts.width, dtype=x.dtype, device=x.device)
        bias = (packed["up_bias"], packed["down_bias"]) if facts.bias else (x, x)
        common = {"ROWS": tile.rows, "BIAS": facts.bias, "WIDTH": facts.width, "HIDDEN": facts.hidden}
        _up[(triton.cdiv(facts.hidden, tile.up.columns), len(owner))](
            x, self._weights(packed["up"], 2, tile.up), bias[0], weights, order, owner, hidden, pairs, x.stride(0), facts.alpha or 0.0,
            facts.limit or 0.0, TOP_K=facts.top_k, KIND=kind_of(facts), SCALE=facts.scale_input, **common,
            **self._cut(tile.rows, 2, tile.up, x.device),
        )  # fmt: skip
        blocks = (_rows_of(hidden, rows, tile.down) for rows in (tile.rows, tile.rows // 2))
        _down[(triton.cdiv(facts.width, tile.down.columns), len(owner))](
            *blocks, self._weights(packed["down"], 1, tile.down), bias[1], weights, order, owner, parts, pairs,
            SCALE=not facts.scale_input, **common, **self._cut(tile.rows, 1, tile.down, x.device),
        )  # fmt: skip
        return sum_choices(facts, parts, ids, x.dtype)

    def _tile(self, pairs: int, device: torch.device) -> MoeTile:
        facts = self.facts
        aligned = facts.width % 8 == 0 and facts.hidden % 8 == 0  # a descriptor's rows begin at multiples of 16 bytes
        tile = moe_tile(pairs / facts.experts, aligned and describes(device))
        return tile if facts.dtype != "float32" else float32_tile(min(tile.rows, FIXED.rows))

    def _weights(self, weight: torch.Tensor, halves: int, cut: Cut) -> torch.Tensor | TensorDescriptor:
        if not cut.described:
            return weight
        view = weight.view(-1, weight.shape[-2] // halves, weight.shape[-1])
        return TensorDescriptor(view, list(view.shape), list(view.stride()), [halves, cut.columns, cut.inner])

    def _cut(self, rows: int, halves: int, cut: Cut, device: torch.device) -> dict[str, int | bool]:
        """Launch arguments, with as many of the stages as a program's shared memory holds: AMD has 64 KiB."""
        stage = (rows + halves * cut.columns) * cut.inner * (4 if self.facts.dtype == "float32" else 2)
        stages = fitting_stages(device, cut.stages, stage)
        return {
            "BLOCK_N": cut.columns,
            "BLOCK_K": cut.inner,
            "DESCRIBED": cut.described,
            "HALVES": HALVED and rows >= 128,
            "num_warps": cut.warps,
            "num_stages": stages,
            **early(device),
        }


def _rows_of(hidden: torch.Tensor, rows: int, cut: Cut) -> torch.Tensor | TensorDescriptor:
    return TensorDescriptor(hidden, list(hidden.shape), list(hidden.stride()), [rows, cut.inner]) if cut.described else hidden


class MoeMlpFixed(MoeMlp):
    """The same with one tile for any number of choices: a token's sums are taken in one order, whoever else is there."""

    def _apart(self, tokens: int) -> bool:
        return False

    def _tile(self, pairs: int, device: torch.device) -> MoeTile:
        return FIXED if self.facts.dtype != "float32" else float32_tile(FIXED.rows)
