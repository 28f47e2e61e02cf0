"""The systems of the gated delta rule's chunks, solved: of what a chunk's tokens write, all that the state before it does not enter.

Of a chunk with keys k, queries q, amounts β and decays d[l, m] from token m to l: A[l, m] = β[l] · (k[l] · k[m]) · d[l, m] below the
diagonal, and T = (1 + A)⁻¹ · β. The inverse begins as that of blocks of one token; at each level all pairs of blocks become one of both
sizes, in two products of numbers as wide as tf32's, which lie below 2 for keys of unit length. Where a head decays, d goes into the
products' results, as lengths of keys and queries do, so that these are multiplied as they lie in memory. Where channels decay (Kimi Linear,
arXiv:2510.26692), d goes into both factors, at each level counted from where the two blocks meet: no factor is above one, however strong
the decay, and nothing is multiplied pair by pair. Sums of decays are products with ones.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from pagoda.ops.delta import DeltaFacts
from pagoda.ops.state import StateBatch
from pagoda.ops.triton.launch import early, registers
from pagoda.ops.triton.order import let_next_start, wait_for_last
from pagoda.ops.triton.paged_kernels import LOG2E
from pagoda.ops.triton.state_rows import SIZES, STEP, piece_of, rows_of, sigmoid, softplus, tile_of


@triton.jit
def over_length(squares):
    """1 over the length of a vector, of the sum of its squares."""
    return tl.rsqrt(squares + 1e-6)


@triton.jit
def amount_of(beta, DOUBLE: tl.constexpr):
    amount = sigmoid(beta.to(tl.float32))
    if DOUBLE:
        amount = 2.0 * amount
    return amount


@triton.jit
def _decay(moved, rates, head):
    """Its logarithm to base 2. What decays by more has nothing left in float32, and sums of such numbers would leave none of the others."""
    return tl.maximum(softplus(moved) * (tl.load(rates + head) * LOG2E), -150.0)


@triton.jit
def _times(a, b):
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _meet(row, column, level):
    """Where a later block of a pair of blocks of 2^level tokens meets the earlier one."""
    block = row >> level
    return tl.where((block & 1) == 1, block, 0) == (column >> level) + 1


@triton.jit
def _counted(row, column, level):
    """Decays between a token and where its block meets the other of its pair: a later block's since then, an earlier one's until then."""
    late = ((row >> level) & 1) == 1
    return ((row >> level) == (column >> level)) & ((column <= row) == late)


@triton.jit
def _inverse(a, CHUNK: tl.constexpr, LEVELS: tl.constexpr, NUMBER: tl.constexpr):
    """(1 + a)⁻¹ of what `a` has below the diagonal. CHUNK: 2 to the LEVELS."""
    row, column = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    x = tl.where(row == column, 1.0, tl.where(_meet(row, column, 0), -a, 0.0))
    for level in tl.range(1, LEVELS, num_stages=1):  # unrolled, it would want all levels' masks in registers
        narrow = x.to(NUMBER)
        turned = _times(narrow, tl.where(_meet(row, column, level), -a, 0.0).to(NUMBER)).to(NUMBER)
        x = tl.dot(turned, narrow, x, input_precision="ieee")
    return x


@triton.jit
def _squares(x):
    wide = x.to(tl.float32)
    return tl.sum(wide * wide, 1)


@triton.jit(do_not_specialize=["many", *SIZES], do_not_specialize_on_alignment=STEP)
def _by_head(q, k, v, step, beta, bias, rates, solved_k, solved_v, weights, sinces, laters, shrinks, query_start, many, few,
             q_t, q_h, k_t, k_h, v_t, v_h, g_t, g_h, beta_t, HEADS: tl.constexpr, K_HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
             BLOCK_K: tl.constexpr, ALL_V: tl.constexpr, DOUBLE: tl.constexpr, CHUNK: tl.constexpr, LEVELS: tl.constexpr,
             EARLY: tl.constexpr):  # fmt: skip
    """Heads × chunks; request r owns chunks as in `piece_of`. What lies past a request's end, or past K or V, becomes 0."""
    let_next_start(EARLY)
    wait_for_last(EARLY)
    head, block = tl.program_id(0), tl.program_id(1)
    start, end = piece_of(query_start, block, many, few, CHUNK)
    if start >= end:
        return
    NUMBER: tl.constexpr = solved_k.dtype.element_ty
    WIDE: tl.constexpr = tl.float32 if tl.float32 == NUMBER else tl.float16
    shared = head // (HEADS // K_HEADS)
    each, channel, column = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K), tl.arange(0, ALL_V)
    there = start + each < end
    at = (start + each).to(tl.int64)
    place = block.to(tl.int64) * HEADS + head
    key = rows_of(k + shared * k_h, start, end, k_t, channel, K, CHUNK)
    query = rows_of(q + shared * q_h, start, end, q_t, channel, K, CHUNK)
    amount = amount_of(tl.load(beta + at * beta_t + head, mask=there, other=0.0), DOUBLE)
    moved = tl.load(step + at * g_t + head, mask=there, other=0.0).to(tl.float32) + tl.load(bias + head)
    decay = tl.where(there, _decay(moved, rates, head), 0.0)
    so_far, total = tl.cumsum(decay, 0), tl.sum(decay, 0)
    of_key = over_length(_squares(key))
    of_query = over_length(_squares(query)) * K**-0.5
    tl.store(sinces + place * CHUNK + each, tl.exp2(so_far) * of_query)
    tl.store(laters + place * CHUNK + each, tl.exp2(total - so_far) * of_key)
    tl.store(shrinks + place, tl.exp2(total))
    lower = each[:, None] >= each[None, :]
    between = tl.exp2(tl.where(lower, so_far[:, None] - so_far[None, :], float("-inf"))) * of_key[None, :]
    turned = tl.trans(key)
    tl.store(tile_of(weights, place, each, each, CHUNK, CHUNK), (_times(query, turned) * between * of_query[:, None]).to(NUMBER))
    a = _times(key, turned) * between * (amount * of_key)[:, None]
    inverse = _inverse(a, CHUNK, LEVELS, WIDE)
    value = rows_of(v + head * v_h, start, end, v_t, column, V, CHUNK)
    tl.store(tile_of(solved_v, place, each, column, CHUNK, ALL_V), _times((inverse * amount[None, :]).to(NUMBER), value).to(NUMBER))
    system = (inverse * (amount * of_key * tl.exp2(so_far))[None, :]).to(NUMBER)
    key = rows_of(k + shared * k_h, start, end, k_t, channel, K, CHUNK)  # once more, as registers are dearer
    tl.store(tile_of(solved_k, place, each, channel, CHUNK, BLOCK_K), _times(system, key).to(NUMBER))


@triton.jit(do_not_specialize=["many", *SIZES], do_not_specialize_on_alignment=STEP)
def _by_channel(q, k, v, step, beta, bias, rates, solved_k, solved_v, weights, queries, keys, shrinks, query_start, many, few,
                q_t, q_h, k_t, k_h, v_t, v_h, g_t, g_h, beta_t, HEADS: tl.constexpr, K_HEADS: tl.constexpr, K: tl.constexpr,
                V: tl.constexpr, BLOCK_K: tl.constexpr, ALL_V: tl.constexpr, DOUBLE: tl.constexpr, CHUNK: tl.constexpr,
                LEVELS: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """The same where channels decay; queries and keys, decayed since the chunk began and until it ends, are tiles too."""
    let_next_start(EARLY)
    wait_for_last(EARLY)
    head, block = tl.program_id(0), tl.program_id(1)
    start, end = piece_of(query_start, block, many, few, CHUNK)
    if start >= end:
        return
    NUMBER: tl.constexpr = solved_k.dtype.element_ty
    WIDE: tl.constexpr = tl.float32 if tl.float32 == NUMBER else tl.float16
    shared = head // (HEADS // K_HEADS)
    each, channel, column = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K), tl.arange(0, ALL_V)
    there = start + each < end
    at = (start + each).to(tl.int64)
    place = block.to(tl.int64) * HEADS + head
    inside = there[:, None] & (channel < K)[None, :]
    moved = rows_of(step + head * g_h, start, end, g_t, channel, K, CHUNK).to(tl.float32)
    moved += tl.load(bias + head * K + channel, mask=channel < K, other=0.0)[None, :]
    decay = tl.where(inside, _decay(moved, rates, head), 0.0)
    tl.store(shrinks + place * BLOCK_K + channel, tl.exp2(tl.sum(decay, 0)))
    decay = decay.to(WIDE)
    key = rows_of(k + shared * k_h, start, end, k_t, channel, K, CHUNK)
    query = rows_of(q + shared * q_h, start, end, q_t, channel, K, CHUNK)
    of_key = over_length(_squares(key))
    of_query = over_length(_squares(query)) * K**-0.5
    row, other = each[:, None], each[None, :]
    a = tl.zeros([CHUNK, CHUNK], tl.float32)
    weight = tl.where(row == other, tl.sum(query.to(tl.float32) * key.to(tl.float32), 1)[:, None], 0.0)
    for level in tl.range(0, LEVELS, num_stages=1):
        reach = tl.exp2(_times(_counted(row, other, level).to(WIDE), decay))
        further = (row >> level) > (other >> level)
        near = (key.to(tl.float32) * reach).to(NUMBER)
        a = tl.where(further, _times(near, tl.trans(near)), a)
        weight = tl.where(further, _times((query.to(tl.float32) * reach).to(NUMBER), tl.trans(near)), weight)
    tl.store(tile_of(weights, place, each, each, CHUNK, CHUNK), (weight * of_query[:, None] * of_key[None, :]).to(NUMBER))
    amount = amount_of(tl.load(beta + at * beta_t + head, mask=there, other=0.0), DOUBLE)
    inverse = _inverse(a * (amount * of_key)[:, None] * of_key[None, :], CHUNK, LEVELS, WIDE)
    value = rows_of(v + head * v_h, start, end, v_t, column, V, CHUNK)
    tl.store(tile_of(solved_v, place, each, column, CHUNK, ALL_V), _times((inverse * amount[None, :]).to(NUMBER), value).to(NUMBER))
    key = rows_of(k + shared * k_h, start, end, k_t, channel, K, CHUNK)  # once more, as above
    later = tl.exp2(_times((other > row).to(WIDE), decay)) * of_key[:, None]
    tl.store(tile_of(keys, place, each, channel, CHUNK, BLOCK_K), (key.to(tl.float32) * later).to(NUMBER))
    since = tl.exp2(_times((other <= row).to(WIDE), decay))
    query = rows_of(q + shared * q_h, start, end, q_t, channel, K, CHUNK)
    tl.store(tile_of(queries, place, each, channel, CHUNK, BLOCK_K), (query.to(tl.float32) * since * of_query[:, None]).to(NUMBER))
    system = (inverse * (amount * of_key)[None, :]).to(NUMBER)
    tl.store(tile_of(solved_k, place, each, channel, CHUNK, BLOCK_K), _times(system, (key.to(tl.float32) * since).to(NUMBER)).to(NUMBER))


class Inputs(NamedTuple):
    """Arguments of a launch as `GatedDelta.run` has them, their last dimension without gaps."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    step: torch.Tensor
    beta: torch.Tensor
    bias: torch.Tensor
    rates: torch.Tensor

    @property
    def steps(self) -> tuple[int, ...]:
        """`q_t, q_h, k_t, k_h, v_t, v_h, g_t, g_h, beta_t`."""
        pairs = (tensor.stride()[:2] for tensor in (self.q, self.k, self.v, self.step))
        return (*(step for pair in pairs for step in pair), self.beta.stride(0))


class Solved(NamedTuple):
    """Of all chunks, `[chunks, heads, …]`, chunk c of request r the (query_start[r] // chunk + r + c)-th; what belongs to none is nobody's.

    Attributes:
        chunk: tokens of one, L.
        solved_k, solved_v: T · (k · since), `[L, block of K]`; T · v, `[L, block of V]`.
        weights: what queries see of what the chunk writes, `[L, L]`.
        queries, keys: by channel, decayed since the chunk began and until it ends, `[L, block of K]`; else factors `[L]` of those that run
            has: decays, and what makes their lengths 1.
        shrinks: what becomes of the state: `[block of K]` by channel, else one number.
    """

    chunk: int
    solved_k: torch.Tensor
    solved_v: torch.Tensor
    weights: torch.Tensor
    queries: torch.Tensor
    keys: torch.Tensor
    shrinks: torch.Tensor


def block_of_dim(size: int) -> int:
    """Columns of a tile that products take."""
    return max(16, triton.next_power_of_2(size))


def systems(facts: DeltaFacts, inputs: Inputs, batch: StateBatch, few: int, warps: int, most: int) -> Solved:
    """Of requests of more than `few` tokens. It needs 2 · K + 2 · V + 128 bytes a token and head in 16 bits, 4 · K more by channel."""
    v, heads = inputs.v, facts.heads
    levels = 6 if v.element_size() == 2 else 4  # what has no matrix units multiplies blocks that fit into registers
    chunk, device = 1 << levels, v.device
    chunks, block_k, all_v = v.shape[0] // chunk + batch.many, block_of_dim(facts.k_dim), block_of_dim(facts.v_dim)

    def tiles(*shape: int, dtype: torch.dtype = v.dtype) -> torch.Tensor:
        return torch.empty(chunks, heads, *shape, dtype=dtype, device=device)

    if facts.by_channel:
        beside = tiles(chunk, block_k), tiles(chunk, block_k), tiles(block_k, dtype=torch.float32)
    else:
        beside = tiles(chunk, dtype=torch.float32), tiles(chunk, dtype=torch.float32), tiles(1, dtype=torch.float32)
    solved = Solved(chunk, tiles(chunk, block_k), tiles(chunk, all_v), tiles(chunk, chunk), *beside)
    kernel: Any = _by_channel if facts.by_channel else _by_head
    kernel[(heads, chunks)](
        *inputs, *solved[1:], batch.query_start, batch.many, few, *inputs.steps, HEADS=heads, K_HEADS=facts.k_heads, K=facts.k_dim,
        V=facts.v_dim, BLOCK_K=block_k, ALL_V=all_v, DOUBLE=facts.double, CHUNK=chunk, LEVELS=levels, num_warps=warps,
        **registers(device, most), **early(device),
    )  # fmt: skip
    return solved
