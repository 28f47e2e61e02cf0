"""Experts of one or few tokens in Triton, whose choices are hardly ever the same: each choice reads its expert by itself.

Nothing is sorted and no matrix unit is asked: gate, up and their activation for each choice, then a token's result over all its choices
at once, which nobody has to add up afterwards.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from pagoda.ops.moe import MoeMlpFacts
from pagoda.ops.triton.launch import early
from pagoda.ops.triton.moe_activation import activated, kind_of
from pagoda.ops.triton.order import let_next_start, wait_for_last
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

APART = 0.95
"""Of the choices so many are of different experts, in the mean, where each reads its own."""


class Few(NamedTuple):
    """Rows of weights and inner numbers of a program's tile."""

    rows: int
    inner: int
    warps: int = 4


UP, DOWN = Few(2, 1024), Few(4, 1024, 8)
"""Measured by `benchmarks/gpu_share.py --only few-experts`."""


@triton.jit(do_not_specialize=["first"], do_not_specialize_on_alignment=["ids"])
def _up(x, weight, bias, scales, ids, hidden, first, x_t, alpha, limit, WIDTH: tl.constexpr, HIDDEN: tl.constexpr, LOCAL: tl.constexpr,
        TOP_K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, KIND: tl.constexpr, BIAS: tl.constexpr, SCALE: tl.constexpr,
        EARLY: tl.constexpr):  # fmt: skip
    """Tiles × choices: `act(x · gateᵀ, x · upᵀ)` of BLOCK_N hidden numbers."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    pair = tl.program_id(1)
    expert = (tl.load(ids + pair) - first).to(tl.int64)
    if (expert < 0) | (expert >= LOCAL):
        return
    n, k = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    there = (n < HIDDEN)[:, None]
    gates = weight + (expert * (2 * HIDDEN) + n)[:, None] * WIDTH
    ups = gates + HIDDEN * WIDTH
    x += (pair // TOP_K).to(tl.int64) * x_t
    one = tl.load(gates + k[None, :], mask=there & (k < WIDTH)[None, :], other=0.0)
    two = tl.load(ups + k[None, :], mask=there & (k < WIDTH)[None, :], other=0.0)
    gate = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    up = gate
    for start in range(0, WIDTH, BLOCK_K):
        value = tl.load(x + start + k, mask=start + k < WIDTH, other=0.0).to(tl.float32)[None, :]
        later = start + BLOCK_K + k
        ahead = there & (later < WIDTH)[None, :]
        following = tl.load(gates + later[None, :], mask=ahead, other=0.0)
        gate += one.to(tl.float32) * value
        one = following
        following = tl.load(ups + later[None, :], mask=ahead, other=0.0)
        up += two.to(tl.float32) * value
        two = following
    gates_N, ups_N = tl.sum(gate, 1), tl.sum(up, 1)
    if SCALE:
        scale = tl.load(scales + pair).to(tl.float32)
        gates_N, ups_N = gates_N * scale, ups_N * scale
    if BIAS:
        biases = bias + expert * (2 * HIDDEN) + n
        gates_N += tl.load(biases, mask=n < HIDDEN, other=0.0).to(tl.float32)
        ups_N += tl.load(biases + HIDDEN, mask=n < HIDDEN, other=0.0).to(tl.float32)
    result = activated(gates_N, ups_N, alpha, limit, KIND).to(hidden.dtype.element_ty)
    tl.store(hidden + pair.to(tl.int64) * HIDDEN + n, result, mask=n < HIDDEN)


@triton.jit
def _tile(weight, mine, step, n, WIDTH: tl.constexpr, HIDDEN: tl.constexpr, LOCAL: tl.constexpr, TOP_K: tl.constexpr,
          BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, STEPS: tl.constexpr):  # fmt: skip
    """Of a step over the choices' inner numbers (weights, expert, whether it is on this rank, choice, first inner number)."""
    choice, start = step // STEPS, step % STEPS * BLOCK_K
    k = tl.arange(0, BLOCK_K)
    expert = tl.sum(tl.where(tl.arange(0, BLOCK_T) == choice, mine, 0), 0)
    here = (expert >= 0) & (expert < LOCAL) & (choice < TOP_K)
    place = (expert.to(tl.int64) * WIDTH + n)[:, None] * HIDDEN + (start + k)[None, :]
    mask = (n < WIDTH)[:, None] & (start + k < HIDDEN)[None, :] & here
    return tl.load(weight + place, mask=mask, other=0.0), expert, here, choice, start


@triton.jit(do_not_specialize=["first"], do_not_specialize_on_alignment=["ids"])
def _down(hidden, weight, bias, scales, ids, out, first, WIDTH: tl.constexpr, HIDDEN: tl.constexpr, LOCAL: tl.constexpr,
          TOP_K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BIAS: tl.constexpr,
          SCALE: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """Tiles × tokens: BLOCK_N numbers of a token's result, the sum over its choices that are on this rank."""
    steps: tl.constexpr = (HIDDEN + BLOCK_K - 1) // BLOCK_K
    token = tl.program_id(1)
    n, k, place = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_T)
    # Of the kernel before the last one, which has ended, since all programs of the last one have waited for it.
    mine = (tl.load(ids + token * TOP_K + place, mask=place < TOP_K, other=-1) - first).to(tl.int32)
    tile, expert, here, choice, start = _tile(weight, mine, token * 0, n, WIDTH, HIDDEN, LOCAL, TOP_K, BLOCK_T, BLOCK_K, steps)
    let_next_start(EARLY)
    wait_for_last(EARLY)
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    added = tl.zeros([BLOCK_N], tl.float32)
    for step in range(TOP_K * steps):
        pair = (token * TOP_K + choice).to(tl.int64)
        value = tl.load(hidden + pair * HIDDEN + start + k, mask=(start + k < HIDDEN) & here, other=0.0).to(tl.float32)
        share = 1.0
        if SCALE:
            share = tl.load(scales + pair).to(tl.float32)
        if BIAS:
            bias_N = tl.load(bias + expert.to(tl.int64) * WIDTH + n, mask=(n < WIDTH) & here & (start == 0), other=0.0)
            added += bias_N.to(tl.float32) * share
        following, expert, here, choice, start = _tile(weight, mine, step + 1, n, WIDTH, HIDDEN, LOCAL, TOP_K, BLOCK_T, BLOCK_K, steps)
        acc += tile.to(tl.float32) * (value * share)[None, :]
        tile = following
    result = tl.sum(acc, 1) + added
    tl.store(out + token.to(tl.int64) * WIDTH + n, result.to(out.dtype.element_ty), mask=n < WIDTH)


def few_alike(facts: MoeMlpFacts, tokens: int) -> bool:
    """Whether so many tokens' choices are nearly all of different experts: their number is that of random choices."""
    different = facts.experts * (1 - (1 - facts.top_k / facts.experts) ** tokens)
    return different >= APART * tokens * facts.top_k


def choices_apart(facts: MoeMlpFacts, packed: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor,
                  up: Few = UP, down: Few = DOWN) -> torch.Tensor:  # fmt: skip
    """`MoeMlpReference.run` where each choice reads its expert by itself. Rows are contiguous."""
    tokens, pairs = x.shape[0], ids.numel()
    hidden = torch.empty(pairs, facts.hidden, dtype=x.dtype, device=x.device)
    out = torch.empty(tokens, facts.width, dtype=x.dtype, device=x.device)
    bias = (packed["up_bias"], packed["down_bias"]) if facts.bias else (x, x)
    common = {
        "WIDTH": facts.width, "HIDDEN": facts.hidden, "LOCAL": facts.local or facts.experts, "TOP_K": facts.top_k, "BIAS": facts.bias,
        **early(x.device),
    }  # fmt: skip
    _up[(triton.cdiv(facts.hidden, up.rows), pairs)](
        x, packed["up"], bias[0], weights, ids, hidden, facts.first, x.stride(0), facts.alpha or 0.0, facts.limit or 0.0,
        BLOCK_N=up.rows, BLOCK_K=min(up.inner, triton.next_power_of_2(facts.width)), KIND=kind_of(facts), SCALE=facts.scale_input,
        num_warps=up.warps, **common,
    )  # fmt: skip
    _down[(triton.cdiv(facts.width, down.rows), tokens)](
        hidden, packed["down"], bias[1], weights, ids, out, facts.first, BLOCK_T=triton.next_power_of_2(facts.top_k), BLOCK_N=down.rows,
        BLOCK_K=min(down.inner, triton.next_power_of_2(facts.hidden)), SCALE=not facts.scale_input, num_warps=down.warps, **common,
    )  # fmt: skip
    return out
