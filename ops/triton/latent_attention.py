"""Paged attention over latents in Triton (arXiv:2405.04434): keys and values are one tile, read once for all heads.

Keys lie on the matrix units' long side and rows (query tokens × heads) on the short one, so that few heads waste nothing: a tile of
keys times the block's queries, then the same tile's latents, turned, times the weights. What belongs to the latent and what was rotated are
two products, since their widths are powers of two and their sum is not.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from pagoda.ops.attention import AttentionFacts, PagedBatch
from pagoda.ops.triton.float8 import as_stored, numbers
from pagoda.ops.triton.launch import most_stages, shared_memory
from pagoda.ops.triton.order import let_next_start, wait_for_last
from pagoda.ops.triton.paged_attention import PagedAttention, Part, early_of
from pagoda.ops.triton.paged_kernels import LOG2E, STEP, block_of, divided, halved, keep, rows_of
from pagoda.ops.triton.tiles import LARGE, Tile, latent_tile

PROGRAMS = 128
"""Of decodes: one a multiprocessor of a large device, since a tile fills its memory."""
ROWS = 64
"""Query rows of a block, at most: the results of more do not fit into registers."""


@triton.jit
def _tile(pages, table, first, high, p_p, p_t, PAGE: tl.constexpr, TILE: tl.constexpr, START: tl.constexpr, WIDTH: tl.constexpr,
          BLOCK: tl.constexpr):  # fmt: skip
    """WIDTH numbers from START on of keys `first` … [TILE, BLOCK]; those from `high` on are 0."""
    t, d = tl.arange(0, TILE), tl.arange(0, BLOCK)
    if TILE <= PAGE:
        page = tl.load(table + first // PAGE).to(tl.int64)
        offsets = page * p_p + (first % PAGE + t) * p_t
    else:
        page = tl.load(table + (first + t) // PAGE, mask=first + t < high, other=0).to(tl.int64)
        offsets = page * p_p + ((first + t) % PAGE) * p_t
    mask = (first + t < high)[:, None]
    if WIDTH < BLOCK:
        mask = mask & (d < WIDTH)[None, :]
    return tl.load(pages + START + offsets[:, None] + d[None, :], mask=mask, other=0.0)


@triton.jit
def gathered(pages, table, position, there, p_p, p_t, PAGE: tl.constexpr, START: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """WIDTH numbers from START on of the keys at some positions, `[keys, BLOCK]`; 0 where they are not `there`."""
    d = tl.arange(0, BLOCK)
    page = tl.load(table + position // PAGE, mask=there, other=0).to(tl.int64)
    offsets = page * p_p + (position % PAGE) * p_t
    mask = there[:, None]
    if WIDTH < BLOCK:
        mask = mask & (d < WIDTH)[None, :]
    return tl.load(pages + START + offsets[:, None] + d[None, :], mask=mask, other=0.0)


@triton.jit(do_not_specialize=["num_requests", "num_blocks", "table_r", "splits", "most"], do_not_specialize_on_alignment=STEP)
def attend_latent(q, pages, out, part, lse, query_start, seq_lens, table, chosen, scale, num_requests, num_blocks, splits, most, q_t, q_h,
                  o_t, o_h, p_p, p_t, table_r, HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_M: tl.constexpr,
                  SINGLE: tl.constexpr, TILE: tl.constexpr, PAGE: tl.constexpr, LATENT: tl.constexpr, TURNED: tl.constexpr,
                  BLOCK_L: tl.constexpr, BLOCK_T: tl.constexpr, PARTIAL: tl.constexpr, FEWEST: tl.constexpr, STAGES: tl.constexpr,
                  TURN: tl.constexpr, HALF: tl.constexpr, CHOSEN: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """Blocks × groups of GROUP heads × splits; blocks, SINGLE, FEWEST and PARTIAL as in `paged_kernels.attend`. CHOSEN: of the keys that
    `chosen` [tokens, most] names, by their positions and −1 for none; blocks are of one token."""
    let_next_start(EARLY)
    group, split = tl.program_id(1), tl.program_id(2)
    request, first, queries, start = block_of(query_start, num_requests, num_blocks, BLOCK_Q, SINGLE)
    seq_len = tl.load(seq_lens + request)
    wait_for_last(EARLY)
    if (start >= queries) | (queries < FEWEST):
        return
    row, head, valid = rows_of(start, queries, group, GROUP, BLOCK_Q, BLOCK_M)
    valid = valid & (head < HEADS)
    position = seq_len - queries + row
    token = (first + row).to(tl.int64)
    latent, turned = tl.arange(0, BLOCK_L), tl.arange(0, BLOCK_T)
    query = q + token[:, None] * q_t + head[:, None] * q_h
    q_latent = tl.load(query + latent[None, :], mask=valid[:, None] & (latent < LATENT)[None, :], other=0.0)
    q_turned = tl.load(query + LATENT + turned[None, :], mask=valid[:, None] & (turned < TURNED)[None, :], other=0.0)
    if HALF:
        q_latent, q_turned = halved(q_latent), halved(q_turned)

    lowest = seq_len - queries + start
    last = tl.minimum(lowest + BLOCK_Q, seq_len)
    if CHOSEN:
        last = tl.minimum(last, most)
        names = chosen + (first + start).to(tl.int64) * most
    per_split = tl.cdiv(tl.cdiv(last, TILE), splits) * TILE
    low = split * per_split
    high = tl.minimum(low + per_split, last)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_L, BLOCK_M] if TURN else [BLOCK_M, BLOCK_L], tl.float32)
    table += request * table_r
    # Masked throughout: a loop for whole tiles and one for the last would bring that one's tile through registers, which do not suffice.
    for at in tl.range(low, high, TILE, num_stages=STAGES):
        j = at + tl.arange(0, TILE)
        if CHOSEN:
            j = tl.load(names + j, mask=j < high, other=-1)
            there = j >= 0
            keys = numbers(gathered(pages, table, j, there, p_p, p_t, PAGE, 0, LATENT, BLOCK_L), q_latent.dtype)
            rest = numbers(gathered(pages, table, j, there, p_p, p_t, PAGE, LATENT, TURNED, BLOCK_T), q_latent.dtype)
        else:
            there = j < high
            keys = numbers(_tile(pages, table, at, high, p_p, p_t, PAGE, TILE, 0, LATENT, BLOCK_L), q_latent.dtype)
            rest = numbers(_tile(pages, table, at, high, p_p, p_t, PAGE, TILE, LATENT, TURNED, BLOCK_T), q_latent.dtype)
        if TURN:
            logits = tl.dot(keys, tl.trans(q_latent), input_precision="ieee")
            logits = tl.dot(rest, tl.trans(q_turned), logits, input_precision="ieee") * (scale * LOG2E)
            seen = there[:, None] & valid[None, :] & (j[:, None] <= position[None, :])
        else:
            logits = tl.dot(q_latent, tl.trans(keys), input_precision="ieee")
            logits = tl.dot(q_turned, tl.trans(rest), logits, input_precision="ieee") * (scale * LOG2E)
            seen = there[None, :] & valid[:, None] & (j[None, :] <= position[:, None])
        logits = tl.where(seen, logits, float("-inf"))
        new_top = tl.maximum(top, tl.max(logits, 0 if TURN else 1))
        safe = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight = tl.exp2(logits - (safe[None, :] if TURN else safe[:, None]))
        shrink = tl.exp2(top - safe)
        total = total * shrink + tl.sum(weight, 0 if TURN else 1)
        if TURN:
            acc = tl.dot(tl.trans(keys), weight.to(q_latent.dtype), acc * shrink[None, :], input_precision="ieee")
        else:
            acc = tl.dot(weight.to(q_latent.dtype), keys, acc * shrink[:, None], input_precision="ieee")
        top = new_top
    if TURN:
        acc = tl.trans(acc)
    inside = valid[:, None] & (latent < LATENT)[None, :]
    if PARTIAL:
        base = (request.to(tl.int64) * HEADS + head) * splits + split
        keep(part, lse, base, latent, acc, total, top, inside & (low < high), valid, LATENT)
    else:
        result = divided(acc, total, top, lse, head, valid, False)
        where = out + token[:, None] * o_t + head[:, None] * o_h + latent[None, :]
        tl.store(where, result.to(out.dtype.element_ty), mask=inside)


class LatentAttention(PagedAttention):
    """`run` as in `ops.attention.PagedAttentionReference`, for facts that say `latent`; prompts and decodes apart, as elsewhere.

    Attributes:
        upright: most rows of a block with which queries are the products' left side.
    """

    upright = 16

    def __init__(self, facts: AttentionFacts) -> None:
        super().__init__(facts)
        self._turned = facts.head_dim - facts.v_dim
        self.block_t = max(triton.next_power_of_2(self._turned), 16)

    def part(
        self, batch: PagedBatch, tokens: slice, tile: Tile | None = None, splits: int = 0, single: bool = False, fewest: int = 0
    ) -> Part:
        single, device = single or batch.max_query <= 1, batch.seq_lens.device
        shared = shared_memory(device)
        tiles, heads = self.groups(device)
        rows = min(heads * (1 if single else max(batch.max_query, 1)), ROWS if shared >= LARGE else 16)
        chosen = tile or latent_tile(rows, self.block_dv + self.block_t, shared)
        stages = min(chosen.stages, most_stages(device))
        chosen = chosen._replace(rows=max(chosen.rows, triton.next_power_of_2(heads)), stages=stages)
        return Part(batch, tokens, chosen, splits or (self._splits_of(batch, chosen.keys, tiles) if single else 1), 0, single, fewest)

    def groups(self, device: torch.device) -> tuple[int, int]:
        """Groups of heads that a tile of keys is read for, and heads in one."""
        tiles = triton.cdiv(self.facts.num_heads, ROWS if shared_memory(device) >= LARGE else 16)
        return tiles, triton.cdiv(self.facts.num_heads, tiles)

    def _splits_of(self, batch: PagedBatch, keys: int, tiles: int) -> int:
        return splits_of(batch.seq_lens.shape[0] * tiles, batch.max_seq, keys)

    def _attend(self, part: Part, q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, out: torch.Tensor,
                partial: torch.Tensor, lse: torch.Tensor, *_: Any) -> None:  # fmt: skip
        self.launch(part, q, k_pages, out, partial, lse, None)

    def launch(self, part: Part, q: torch.Tensor, pages: torch.Tensor, out: torch.Tensor, partial: torch.Tensor, lse: torch.Tensor,
               chosen: torch.Tensor | None) -> None:  # fmt: skip
        """One part, over all keys or over those that are `chosen` `[tokens, K]` int32, rows contiguous."""
        facts, batch, tile, requests = self.facts, part.batch, part.tile, part.batch.seq_lens.shape[0]
        tiles, heads = self.groups(q.device)
        block_q = 1 if part.single or chosen is not None else max(tile.rows // heads, 1)
        blocks = requests if part.single else q.shape[0] // block_q + requests
        attend_latent[(blocks, tiles, part.splits)](
            q, as_stored(pages), out, partial, lse, batch.query_start, batch.seq_lens, batch.block_table, out if chosen is None else chosen,
            facts.scale, requests, blocks, part.splits, 0 if chosen is None else chosen.shape[1], q.stride(0), q.stride(1), out.stride(0),
            out.stride(1), pages.stride(0), pages.stride(1), batch.block_table.stride(0),
            HEADS=facts.num_heads, GROUP=heads, BLOCK_Q=block_q, BLOCK_M=tile.rows, SINGLE=part.single, TILE=tile.keys,
            PAGE=facts.page_size, LATENT=facts.v_dim, TURNED=self._turned, BLOCK_L=self.block_dv,
            BLOCK_T=self.block_t, PARTIAL=part.splits > 1, FEWEST=part.fewest, STAGES=tile.stages,
            TURN=tile.rows > self.upright, HALF=self.half, CHOSEN=chosen is not None, num_warps=tile.warps, num_stages=tile.stages,
            **early_of(part),
        )  # fmt: skip


def splits_of(programs: int, longest: int, keys: int) -> int:
    """Programs that share a row's keys, up to `longest` in tiles of `keys`, where there are `programs` without."""
    return max(min(PROGRAMS // max(programs, 1), -(-longest // keys), 64), 1)
