"""The systems of the gated delta rule's chunks: what a chunk's tokens write, as a matrix, and what its queries see of it, as another.

Of a chunk with keys k, queries q, amounts β and decays from token m to l, d[l, m]: A[l, m] = β[l] · (k[l] · k[m]) · d[l, m] below the
diagonal. The inverse of 1 + A is taken by blocks of 16 tokens: those on the diagonal by forward substitution, those below from them.
Decays of channels go into both sides of a product, counted from where the later block begins, so that no factor is above one; on the
diagonal, where there is no such place between them, pairs are multiplied one by one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from pagoda.ops.delta import DeltaFacts
from pagoda.ops.state import StateBatch
from pagoda.ops.triton.launch import early
from pagoda.ops.triton.paged_kernels import find_request
from pagoda.ops.triton.state_rows import SIZES, STEP, segment
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

CHUNK = 64
"""Tokens of a chunk."""
SIDE = tl.constexpr(16)
"""Tokens of a block."""


@triton.jit
def _rows(x, start, end, x_t, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Keys or queries of 16 tokens from `start`."""
    token, channel = start + tl.arange(0, SIDE), tl.arange(0, BLOCK_K)
    mask = (token < end)[:, None] & (channel < K)[None, :]
    return tl.load(x + token.to(tl.int64)[:, None] * x_t + channel[None, :], mask=mask, other=0.0)


@triton.jit
def _amounts(beta, start, end, beta_t):
    token = start + tl.arange(0, SIDE)
    return tl.load(beta + token.to(tl.int64) * beta_t, mask=token < end, other=0.0).to(tl.float32)


@triton.jit
def _decays(decay, start, end, g_t, K: tl.constexpr, BLOCK_K: tl.constexpr, BY_CHANNEL: tl.constexpr):
    """Logarithms of the decays of 16 tokens."""
    if BY_CHANNEL:
        return _rows(decay, start, end, g_t, K, BLOCK_K)
    else:
        token = start + tl.arange(0, SIDE)
        return tl.load(decay + token.to(tl.int64) * g_t, mask=token < end, other=0.0)


@triton.jit
def _since(step, before, BY_CHANNEL: tl.constexpr):
    """Their sums since the chunk began."""
    if BY_CHANNEL:
        return before[None, :] + tl.cumsum(step, 0)
    else:
        return before + tl.cumsum(step, 0)


@triton.jit
def _below(key, query, amount, sums, before, k, decay, other_start, end, other_before, k_t, g_t, K: tl.constexpr, BLOCK_K: tl.constexpr,
           BY_CHANNEL: tl.constexpr, NUMBER: tl.constexpr):  # fmt: skip
    """A and the queries' weights of a block with the earlier one at `other_start`. before: sums where a block begins."""
    other = _rows(k, other_start, end, k_t, K, BLOCK_K)
    other_sums = _since(_decays(decay, other_start, end, g_t, K, BLOCK_K, BY_CHANNEL), other_before, BY_CHANNEL)
    if BY_CHANNEL:
        since, until = tl.exp(sums - before[None, :]), tl.exp(before[None, :] - other_sums)
        right = tl.trans((other * until).to(NUMBER))
        a = tl.dot((key * since).to(NUMBER), right, input_precision="ieee")
        weight = tl.dot((query * since).to(NUMBER), right, input_precision="ieee")
    else:
        between = tl.exp(sums[:, None] - other_sums[None, :])
        right = tl.trans(other.to(NUMBER))
        a = tl.dot(key.to(NUMBER), right, input_precision="ieee") * between
        weight = tl.dot(query.to(NUMBER), right, input_precision="ieee") * between
    return a * amount[:, None], weight


@triton.jit
def _diagonal(k, q, amount, step, start, end, k_t, q_t, K: tl.constexpr, BLOCK_K: tl.constexpr, BY_CHANNEL: tl.constexpr,
              NUMBER: tl.constexpr):  # fmt: skip
    """The same of a block with itself: A below the diagonal, weights with it."""
    key, query = _rows(k, start, end, k_t, K, BLOCK_K), _rows(q, start, end, q_t, K, BLOCK_K)
    each, sums = tl.arange(0, SIDE), tl.cumsum(step, 0)
    if BY_CHANNEL:
        a = tl.zeros([SIDE, SIDE], tl.float32)
        weight = tl.zeros([SIDE, SIDE], tl.float32)
        for m in range(0, SIDE):
            one = (each == m)[:, None]
            other = tl.sum(tl.where(one, key.to(tl.float32), 0.0), 0)
            other_sums = tl.sum(tl.where(one, sums, 0.0), 0)
            decayed = tl.exp(tl.where((each >= m)[:, None], sums - other_sums[None, :], float("-inf"))) * other[None, :]
            here = (each == m)[None, :]
            a = tl.where(here, tl.sum(key * decayed, 1)[:, None], a)
            weight = tl.where(here, tl.sum(query * decayed, 1)[:, None], weight)
    else:
        between = tl.exp(tl.where(each[:, None] >= each[None, :], sums[:, None] - sums[None, :], float("-inf")))
        right = tl.trans(key.to(NUMBER))
        a = tl.dot(key.to(NUMBER), right, input_precision="ieee") * between
        weight = tl.dot(query.to(NUMBER), right, input_precision="ieee") * between
    return tl.where(each[:, None] > each[None, :], a * amount[:, None], 0.0), weight


@triton.jit
def _eliminated(x, a, m):
    """Rows after the m-th without what they have of it."""
    each = tl.arange(0, SIDE)
    factor = tl.sum(tl.where((each == m)[None, :], a, 0.0), 1)
    return x - factor[:, None] * tl.sum(tl.where((each == m)[:, None], x, 0.0), 0)[None, :]


@triton.jit
def _times(a, b):
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _put(inverses, weights, base, i: tl.constexpr, j: tl.constexpr, inverse, amount, weight, CHUNK: tl.constexpr):
    each = tl.arange(0, SIDE)
    place = base + (each + i * SIDE)[:, None] * CHUNK + (each + j * SIDE)[None, :]
    tl.store(inverses + place, (inverse * amount[None, :]).to(inverses.dtype.element_ty))
    tl.store(weights + place, weight.to(weights.dtype.element_ty))


@triton.jit(do_not_specialize=["many", *SIZES], do_not_specialize_on_alignment=STEP)
def _systems(q, k, decay, beta, inverses, weights, query_start, many, few, q_t, q_h, k_t, k_h, g_t, g_h, beta_t, HEADS: tl.constexpr,
             K_HEADS: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, BY_CHANNEL: tl.constexpr, CHUNK: tl.constexpr,
             EARLY: tl.constexpr):  # fmt: skip
    """Chunks × heads; request r owns chunks as in `find_request`. What lies above the diagonal becomes 0."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    block, head = tl.program_id(0), tl.program_id(1)
    row = find_request(query_start, block, many, CHUNK)
    first, end = segment(query_start, row)
    start = first + (block - (first // CHUNK + row)) * CHUNK
    if (start >= end) | (end - first <= few):
        return
    NUMBER: tl.constexpr = inverses.dtype.element_ty
    shared = head // (HEADS // K_HEADS)
    q += shared * q_h
    k += shared * k_h
    decay += head * g_h
    beta += head
    s1, s2, s3 = start + SIDE, start + 2 * SIDE, start + 3 * SIDE
    g0 = _decays(decay, start, end, g_t, K, BLOCK_K, BY_CHANNEL)
    g1 = _decays(decay, s1, end, g_t, K, BLOCK_K, BY_CHANNEL)
    g2 = _decays(decay, s2, end, g_t, K, BLOCK_K, BY_CHANNEL)
    g3 = _decays(decay, s3, end, g_t, K, BLOCK_K, BY_CHANNEL)
    b1 = tl.sum(g0, 0)
    b0 = b1 * 0.0
    b2 = b1 + tl.sum(g1, 0)
    b3 = b2 + tl.sum(g2, 0)
    n0, n1 = _amounts(beta, start, end, beta_t), _amounts(beta, s1, end, beta_t)
    n2, n3 = _amounts(beta, s2, end, beta_t), _amounts(beta, s3, end, beta_t)
    a00, w00 = _diagonal(k, q, n0, g0, start, end, k_t, q_t, K, BLOCK_K, BY_CHANNEL, NUMBER)
    a11, w11 = _diagonal(k, q, n1, g1, s1, end, k_t, q_t, K, BLOCK_K, BY_CHANNEL, NUMBER)
    a22, w22 = _diagonal(k, q, n2, g2, s2, end, k_t, q_t, K, BLOCK_K, BY_CHANNEL, NUMBER)
    a33, w33 = _diagonal(k, q, n3, g3, s3, end, k_t, q_t, K, BLOCK_K, BY_CHANNEL, NUMBER)
    each = tl.arange(0, SIDE)
    unit = tl.where(each[:, None] == each[None, :], 1.0, 0.0)
    x00 = unit
    x11 = unit
    x22 = unit
    x33 = unit
    for m in range(0, SIDE - 1):
        x00 = _eliminated(x00, a00, m)
        x11 = _eliminated(x11, a11, m)
        x22 = _eliminated(x22, a22, m)
        x33 = _eliminated(x33, a33, m)
    base = (block.to(tl.int64) * HEADS + head) * (CHUNK * CHUNK)
    _put(inverses, weights, base, 0, 0, x00, n0, w00, CHUNK)
    _put(inverses, weights, base, 1, 1, x11, n1, w11, CHUNK)
    _put(inverses, weights, base, 2, 2, x22, n2, w22, CHUNK)
    _put(inverses, weights, base, 3, 3, x33, n3, w33, CHUNK)
    zero = unit * 0.0
    _put(inverses, weights, base, 0, 1, zero, n1, zero, CHUNK)
    _put(inverses, weights, base, 0, 2, zero, n2, zero, CHUNK)
    _put(inverses, weights, base, 0, 3, zero, n3, zero, CHUNK)
    _put(inverses, weights, base, 1, 2, zero, n2, zero, CHUNK)
    _put(inverses, weights, base, 1, 3, zero, n3, zero, CHUNK)
    _put(inverses, weights, base, 2, 3, zero, n3, zero, CHUNK)
    key, query = _rows(k, s1, end, k_t, K, BLOCK_K), _rows(q, s1, end, q_t, K, BLOCK_K)
    sums = _since(g1, b1, BY_CHANNEL)
    a10, w10 = _below(key, query, n1, sums, b1, k, decay, start, end, b0, k_t, g_t, K, BLOCK_K, BY_CHANNEL, NUMBER)
    x10 = 0.0 - _times(x11, _times(a10, x00))
    _put(inverses, weights, base, 1, 0, x10, n0, w10, CHUNK)
    key, query = _rows(k, s2, end, k_t, K, BLOCK_K), _rows(q, s2, end, q_t, K, BLOCK_K)
    sums = _since(g2, b2, BY_CHANNEL)
    a20, w20 = _below(key, query, n2, sums, b2, k, decay, start, end, b0, k_t, g_t, K, BLOCK_K, BY_CHANNEL, NUMBER)
    a21, w21 = _below(key, query, n2, sums, b2, k, decay, s1, end, b1, k_t, g_t, K, BLOCK_K, BY_CHANNEL, NUMBER)
    x21 = 0.0 - _times(x22, _times(a21, x11))
    _put(inverses, weights, base, 2, 1, x21, n1, w21, CHUNK)
    x20 = 0.0 - _times(x22, _times(a20, x00) + _times(a21, x10))
    _put(inverses, weights, base, 2, 0, x20, n0, w20, CHUNK)
    key, query = _rows(k, s3, end, k_t, K, BLOCK_K), _rows(q, s3, end, q_t, K, BLOCK_K)
    sums = _since(g3, b3, BY_CHANNEL)
    a30, w30 = _below(key, query, n3, sums, b3, k, decay, start, end, b0, k_t, g_t, K, BLOCK_K, BY_CHANNEL, NUMBER)
    a31, w31 = _below(key, query, n3, sums, b3, k, decay, s1, end, b1, k_t, g_t, K, BLOCK_K, BY_CHANNEL, NUMBER)
    a32, w32 = _below(key, query, n3, sums, b3, k, decay, s2, end, b2, k_t, g_t, K, BLOCK_K, BY_CHANNEL, NUMBER)
    x32 = 0.0 - _times(x33, _times(a32, x22))
    _put(inverses, weights, base, 3, 2, x32, n2, w32, CHUNK)
    x31 = 0.0 - _times(x33, _times(a31, x11) + _times(a32, x21))
    _put(inverses, weights, base, 3, 1, x31, n1, w31, CHUNK)
    x30 = 0.0 - _times(x33, _times(a30, x00) + _times(a31, x10) + _times(a32, x20))
    _put(inverses, weights, base, 3, 0, x30, n0, w30, CHUNK)


def systems(
    facts: DeltaFacts, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, log_decay: torch.Tensor, beta: torch.Tensor, batch: StateBatch,
    few: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(1 + A)⁻¹ · β and the queries' weights, `[chunks, heads, 64, 64]` in v's dtype, of requests of more than `few` tokens. Chunk c of
    request r is the (query_start[r] // 64 + r + c)-th; what belongs to no chunk is nobody's."""
    chunks = v.shape[0] // CHUNK + batch.many
    inverses = torch.empty(chunks, facts.heads, CHUNK, CHUNK, dtype=v.dtype, device=v.device)
    weights = torch.empty_like(inverses)
    _systems[(chunks, facts.heads)](
        q, k, log_decay, beta, inverses, weights, batch.query_start, batch.many, few, *q.stride()[:2], *k.stride()[:2],
        *log_decay.stride()[:2], beta.stride(0), HEADS=facts.heads, K_HEADS=facts.k_heads, K=facts.k_dim,
        BLOCK_K=max(16, triton.next_power_of_2(facts.k_dim)), BY_CHANNEL=facts.by_channel, CHUNK=CHUNK,
        num_warps=4, **early(v.device),
    )  # fmt: skip
    return inverses, weights
