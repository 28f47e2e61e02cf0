"""Attention of whole sequences over themselves in Triton: ragged segments in one launch, in both directions.

A program has some tokens of one segment and a head. Where the ends lie only the device knows; there are as many programs as any segments of
so many tokens can need. Heads whose size is no power of two are two pieces, if those together are shorter than the next power of two.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from pagoda.hal.kernel import PlainKernel
from pagoda.ops.segment_attention import SegmentAttentionFacts, Segments
from pagoda.ops.triton.launch import early, most_stages, narrow_units, shared_memory
from pagoda.ops.triton.order import let_next_start, wait_for_last
from pagoda.ops.triton.paged_attention import BESIDE, suited
from pagoda.ops.triton.paged_kernels import LOG2E, find_request
from pagoda.ops.triton.tiles import Tile, float32_tile, segment_stages

ALIGNED = 16
"""Steps between heads and tokens that are no multiple of it are not loaded as whole vectors: q, k and v are copied into wider heads then.
Without the copies, heads of 72 in 16 bits were wrong on an H200 by the assembler 12.8 (`assembler.py`); by 12.9 it was not tried."""


@triton.jit
def _piece(rows, inside, START: tl.constexpr, STOP: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr):
    """Numbers START … of a head of some tokens, `[tokens, BLOCK]`; 0 from STOP on and, unless WHOLE, of tokens that are not `inside`."""
    d = START + tl.arange(0, BLOCK)
    where = rows[:, None] + d[None, :]
    if WHOLE and START + BLOCK <= STOP:
        return tl.load(where)
    mask = (d < STOP)[None, :]
    if not WHOLE:
        mask = mask & inside[:, None]
    return tl.load(where, mask=mask, other=0.0)


@triton.jit
def _walk(acc, more, total, top, q_main, q_more, k, v, bias, row, low, high, end, scale, far, k_t, v_t, D: tl.constexpr,
          MAIN: tl.constexpr, MORE: tl.constexpr, BLOCK_MORE: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr, BIAS: tl.constexpr,
          WHOLE: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """Keys [low, high) joined to a block's running softmax, `end` of them in the segment; WHOLE where every row sees all of each tile."""
    for first in tl.range(low, high, TILE, num_stages=STAGES):
        j = first + tl.arange(0, TILE)
        inside = j < end
        keys = k + j.to(tl.int64) * k_t
        key = _piece(keys, inside, 0, D, MAIN, WHOLE)
        logits = tl.dot(q_main, tl.trans(key), input_precision="ieee")
        if MORE:
            logits = tl.dot(q_more, tl.trans(_piece(keys, inside, MAIN, D, BLOCK_MORE, WHOLE)), logits, input_precision="ieee")
        logits = logits * (scale * LOG2E)
        if BIAS:
            distance = tl.minimum(tl.maximum(j[None, :] - row[:, None], -far), far)
            logits += tl.load(bias + distance) * LOG2E
        if not WHOLE:
            seen = inside[None, :]
            if WINDOW >= 0:
                seen = seen & (j[None, :] - row[:, None] <= WINDOW) & (row[:, None] - j[None, :] <= WINDOW)
            logits = tl.where(seen, logits, float("-inf"))
        new_top = tl.maximum(top, tl.max(logits, 1))
        safe = new_top if WHOLE else tl.where(new_top == float("-inf"), 0.0, new_top)
        weight = tl.exp2(logits - safe[:, None])
        shrink = tl.exp2(top - safe)
        total = total * shrink + tl.sum(weight, 1)
        values = v + j.to(tl.int64) * v_t
        weight = weight.to(q_main.dtype)
        acc = tl.dot(weight, _piece(values, inside, 0, D, MAIN, WHOLE), acc * shrink[:, None], input_precision="ieee")
        if MORE:
            value = _piece(values, inside, MAIN, D, BLOCK_MORE, WHOLE)
            more = tl.dot(weight, value, more * shrink[:, None], input_precision="ieee")
        top = new_top
    return acc, more, total, top


@triton.jit(do_not_specialize=["segments", "blocks", "tokens", "far"], do_not_specialize_on_alignment=["starts"])
def attend_segments(q, k, v, out, starts, biases, scale, segments, blocks, tokens, far, q_t, q_h, k_t, k_h, v_t, v_h,
                    HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, MAIN: tl.constexpr, MORE: tl.constexpr,
                    BLOCK_MORE: tl.constexpr, BLOCK_M: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr, BIAS: tl.constexpr,
                    STAGES: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """Blocks × heads, of D numbers in q, k and v and of WIDTH in the result. What lies past the last segment is one more, whose tokens
    become 0."""
    let_next_start(EARLY)
    block, head = tl.program_id(0), tl.program_id(1)
    segment = find_request(starts, block, segments + 1, BLOCK_M)
    start = tl.load(starts + segment)
    stop = tl.where(segment < segments, tl.load(starts + tl.minimum(segment + 1, segments)), tokens)
    begin, length = (block - (start // BLOCK_M + segment)) * BLOCK_M, stop - start
    wait_for_last(EARLY)
    if begin >= length:
        return
    row = begin + tl.arange(0, BLOCK_M)
    valid, token = row < length, (start + row).to(tl.int64)
    d, d_more = tl.arange(0, MAIN), MAIN + tl.arange(0, BLOCK_MORE)
    target = out + (token * HEADS + head)[:, None] * WIDTH
    acc = tl.zeros([BLOCK_M, MAIN], tl.float32)
    more = tl.zeros([BLOCK_M, BLOCK_MORE], tl.float32)
    if segment < segments:
        rows = q + token * q_t + head * q_h
        q_main = _piece(rows, valid, 0, D, MAIN, False)
        q_more = _piece(rows, valid, MAIN, D, BLOCK_MORE, False)
        keys, values = k + start.to(tl.int64) * k_t + head // GROUP * k_h, v + start.to(tl.int64) * v_t + head // GROUP * v_h
        bias = biases + head * (2 * far + 1) + far if BIAS else biases
        low, high = 0, length
        if WINDOW >= 0:
            low = tl.maximum(begin - WINDOW, 0)
            high = tl.minimum(begin + (BLOCK_M + WINDOW), length)
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        middle = low
        if WINDOW < 0:
            middle = low + (high - low) // TILE * TILE
            acc, more, total, top = _walk(acc, more, total, top, q_main, q_more, keys, values, bias, row, low, middle, length, scale, far,
                                          k_t, v_t, D, MAIN, MORE, BLOCK_MORE, TILE, WINDOW, BIAS, True, STAGES)  # fmt: skip
        acc, more, total, top = _walk(acc, more, total, top, q_main, q_more, keys, values, bias, row, middle, high, length, scale, far,
                                      k_t, v_t, D, MAIN, MORE, BLOCK_MORE, TILE, WINDOW, BIAS, False, STAGES)  # fmt: skip
        total = tl.where(total == 0.0, 1.0, total)[:, None]
        acc, more = acc / total, more / total
    tl.store(target + d[None, :], acc.to(out.dtype.element_ty), mask=valid[:, None] & (d < WIDTH)[None, :])
    if MORE:
        tl.store(target + d_more[None, :], more.to(out.dtype.element_ty), mask=valid[:, None] & (d_more < WIDTH)[None, :])


def pieces(dim: int) -> tuple[int, int]:
    """Sizes, each a power of two, of the one or two pieces of a head of `dim` numbers: 80 is 64 and 16, 120 is 128."""
    whole = max(triton.next_power_of_2(dim), 16)
    rest = max(triton.next_power_of_2(dim - whole // 2), 16)
    return (whole, 0) if dim <= 16 or whole // 2 + rest >= whole else (whole // 2, rest)


def segment_tile(mean: int, dim: int, nbytes: int) -> Tile:
    """For segments of `mean` tokens, heads that take `dim` numbers of `nbytes` each."""
    if nbytes > 2:
        return float32_tile(mean, dim)
    wide = dim > 128
    rows = min(max(triton.next_power_of_2(mean), 16), 64 if wide else 128)
    return Tile(rows, 32 if wide else 64, 4 if rows < 128 or dim <= 64 else 8, 2 if wide else 3, False)


class SegmentAttention(PlainKernel):
    """`run(q, k, v, segments, bias=None)`, as in `ops.segment_attention.SegmentAttentionReference`."""

    facts: SegmentAttentionFacts

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: Segments, bias: torch.Tensor | None = None) -> torch.Tensor:
        facts, tokens, count = self.facts, q.shape[0], segments.start.shape[0] - 1
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if tokens == 0:
            return out
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        main, more = pieces(facts.head_dim)
        dim = facts.head_dim
        if any(step % ALIGNED for x in (q, k, v) for step in x.stride()[:2]):
            dim = main + more
            q, k, v = (F.pad(x, (0, dim - facts.head_dim)) for x in (q, k, v))
        tile = self._tile(triton.cdiv(tokens, max(count, 1)), main + more, q, bias)
        blocks = tokens // tile.rows + count + 1
        attend_segments[(blocks, facts.num_heads)](
            q, k, v, out, segments.start, out if bias is None else bias.contiguous(), facts.scale, count, blocks, tokens,
            0 if bias is None else bias.shape[1] // 2, *q.stride()[:2], *k.stride()[:2], *v.stride()[:2],
            HEADS=facts.num_heads, GROUP=facts.num_heads // facts.num_kv_heads, WIDTH=facts.head_dim, D=dim, MAIN=main,
            MORE=more > 0,
            BLOCK_MORE=more or 16, BLOCK_M=tile.rows, TILE=tile.keys, WINDOW=-1 if facts.window is None else facts.window,
            BIAS=bias is not None, STAGES=tile.stages, num_warps=tile.warps, num_stages=tile.stages, **early(q.device),
        )  # fmt: skip
        return out

    def _tile(self, mean: int, dim: int, q: torch.Tensor, bias: torch.Tensor | None) -> Tile:
        """As the device wants it."""
        nbytes = q.element_size()
        tile, most = suited(segment_tile(mean, dim, nbytes), dim, False, q.device), most_stages(q.device, bias is not None)
        loaded = bias.element_size() if bias is not None and narrow_units(q.device) else 0
        return tile._replace(stages=segment_stages(tile, dim, nbytes, loaded, shared_memory(q.device) - BESIDE, most))
