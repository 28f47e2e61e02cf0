"""The choice of keys in Triton: scores of every key that a token may see, then the largest of them without a sort.

The second kernel finds the smallest score that is chosen by its bits, eleven at a time from the highest: how often each of 2,048 values
occurs says which one it is. Then it writes down what is larger, and of what is equal the first ones, in order. Many tokens with many keys
come in turns, so that their scores take bounded room.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from pagoda.hal.kernel import PlainKernel
from pagoda.ops.attention import PagedBatch
from pagoda.ops.sparse_attention import ChooseFacts
from pagoda.ops.triton.float8 import as_stored, numbers
from pagoda.ops.triton.latent_attention import gathered
from pagoda.ops.triton.launch import early, fitting_stages, most_stages, shared_memory
from pagoda.ops.triton.order import let_next_start, wait_for_last
from pagoda.ops.triton.paged_kernels import STEP, block_of, halved
from pagoda.ops.triton.tiles import LARGE

SCORES = 1 << 25
"""Kept at a time."""
LOOK = 4096
"""Scores that the second kernel looks at in one go."""


@triton.jit(do_not_specialize=["num_requests", "num_blocks", "begin", "end", "length", "table_r"], do_not_specialize_on_alignment=STEP)
def _score(q, weights, pages, scores, query_start, seq_lens, table, num_requests, num_blocks, begin, end, length, q_t, q_h, w_t,
           p_p, p_t, table_r, HEADS: tl.constexpr, BLOCK_H: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr,
           TILE: tl.constexpr, BLOCK_Q: tl.constexpr, SINGLE: tl.constexpr, HALF: tl.constexpr, STAGES: tl.constexpr,
           EARLY: tl.constexpr):  # fmt: skip
    """Blocks × tiles of keys: Σ weight · max(q · k, 0) of tokens [begin, end) into rows of `length`, as far as they see."""
    let_next_start(EARLY)
    request, first, queries, start = block_of(query_start, num_requests, num_blocks, BLOCK_Q, SINGLE)
    seq_len = tl.load(seq_lens + request)
    wait_for_last(EARLY)
    lower, upper = tl.maximum(start, begin - first), tl.minimum(tl.minimum(start + BLOCK_Q, queries), end - first)
    at, before = tl.program_id(1) * TILE, seq_len - queries
    if (start >= queries) | (lower >= upper) | (at >= before + upper):
        return
    j, h, d = at + tl.arange(0, TILE), tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    key = gathered(pages, table + request * table_r, j, j < before + upper, p_p, p_t, PAGE, 0, D, BLOCK_D)
    key = numbers(key, tl.float16 if HALF else q.dtype.element_ty)
    for row in tl.range(lower, upper, num_stages=STAGES):
        token = (first + row).to(tl.int64)
        inside = (h < HEADS)[:, None] & (d < D)[None, :]
        query = tl.load(q + token * q_t + h[:, None] * q_h + d[None, :], mask=inside, other=0.0)
        if HALF:
            query = halved(query)
        weight = tl.load(weights + token * w_t + h, mask=h < HEADS, other=0.0).to(tl.float32)
        products = tl.dot(key, tl.trans(query), input_precision="ieee")
        score = tl.sum(tl.maximum(products, 0.0) * weight[None, :], 1)
        tl.store(scores + (token - begin) * length + j, score, mask=j <= before + row)


@triton.jit
def _ordered(scores, place, count):
    """Scores as integers that order as they do; both zeros are one."""
    bits = (tl.load(scores + place, mask=place < count, other=0.0) + 0.0).to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 == 1, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def _narrowed(scores, count, prefix, need, SHIFT: tl.constexpr, BITS: tl.constexpr, LOOK: tl.constexpr):
    """Of the scores whose bits above SHIFT + BITS are `prefix`: those bits and the next BITS of the `need`-th largest, and how many are
    needed of those that have the same."""
    bins = tl.arange(0, 1 << BITS)
    counts = tl.zeros([1 << BITS], tl.int32)
    for start in range(0, count, LOOK):
        place = start + tl.arange(0, LOOK)
        key = _ordered(scores, place, count)
        mine = place < count
        if SHIFT + BITS < 32:
            mine = mine & (key >> (SHIFT + BITS) == prefix)
        counts += tl.histogram(((key >> SHIFT) & ((1 << BITS) - 1)).to(tl.int32), 1 << BITS, mask=mine)
    from_here = tl.sum(counts, 0) - tl.cumsum(counts, 0) + counts
    found = tl.max(tl.where(from_here >= need, bins, 0), 0)
    need -= tl.sum(tl.where(bins > found, counts, 0), 0)
    return (prefix << BITS) | found.to(tl.uint32), need


@triton.jit(do_not_specialize=["num_requests", "num_blocks", "begin", "end", "length"], do_not_specialize_on_alignment=STEP)
def _choose(scores, chosen, query_start, seq_lens, num_requests, num_blocks, begin, end, length, TOP_K: tl.constexpr, LOOK: tl.constexpr,
            SINGLE: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """Tokens: the positions of the TOP_K largest scores of each, of equal ones the first, ascending; −1 past the last."""
    let_next_start(EARLY)
    request, first, queries, start = block_of(query_start, num_requests, num_blocks, 1, SINGLE)
    count = tl.load(seq_lens + request) - queries + start + 1
    wait_for_last(EARLY)
    token = (first + start).to(tl.int64)
    if (start >= queries) | (token < begin) | (token >= end):
        return
    chosen += token * TOP_K
    each = tl.arange(0, LOOK)
    if count <= TOP_K:
        for at in range(0, TOP_K, LOOK):
            tl.store(chosen + at + each, tl.where(at + each < count, at + each, -1), mask=at + each < TOP_K)
        return
    scores += (token - begin) * length
    least, need = _narrowed(scores, count, tl.full([], 0, tl.uint32), TOP_K, 21, 11, LOOK)
    least, need = _narrowed(scores, count, least, need, 10, 11, LOOK)
    least, need = _narrowed(scores, count, least, need, 0, 10, LOOK)
    taken, equal = 0, 0
    for at in range(0, count, LOOK):
        place = at + each
        key = _ordered(scores, place, count)
        same = ((place < count) & (key == least)).to(tl.int32)
        mine = (place < count) & (key > least) | (same > 0) & (equal + tl.cumsum(same, 0) <= need)
        tl.store(chosen + taken + tl.cumsum(mine.to(tl.int32), 0) - 1, place, mask=mine)
        taken += tl.sum(mine.to(tl.int32), 0)
        equal += tl.sum(same, 0)


class ChooseKeys(PlainKernel):
    """`run(q, weights, pages, batch)`, as in `ops.sparse_attention.ChooseKeysReference`."""

    facts: ChooseFacts

    def run(self, q: torch.Tensor, weights: torch.Tensor, pages: torch.Tensor, batch: PagedBatch) -> torch.Tensor:
        tokens, requests, single = q.shape[0], batch.seq_lens.shape[0], batch.max_query <= 1
        covered = single and tokens == requests
        # Padding tokens choose nothing.
        chosen = torch.empty(tokens, self.facts.top_k, dtype=torch.int32, device=q.device)
        if not covered:
            chosen.fill_(-1)
        if tokens == 0 or requests == 0:
            return chosen
        q, weights = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, weights))
        length = max(batch.max_seq, 1)
        turn = tokens if single else min(tokens, max(SCORES // length, 16))
        scores = torch.empty(turn, length, dtype=torch.float32, device=q.device)
        for begin in range(0, tokens, turn):
            end = min(begin + turn, tokens)
            self._score(q, weights, pages, batch, scores, begin, end)
            blocks, most = _blocks(begin, end, requests, 1, single)
            _choose[(blocks,)](
                scores, chosen, batch.query_start, batch.seq_lens, requests, most, begin, end, length, TOP_K=self.facts.top_k, LOOK=LOOK,
                SINGLE=single, num_warps=8, **early(q.device),
            )  # fmt: skip
        return chosen

    def _score(
        self, q: torch.Tensor, weights: torch.Tensor, pages: torch.Tensor, batch: PagedBatch, scores: torch.Tensor, begin: int, end: int
    ) -> None:
        facts, requests, length, single = self.facts, batch.seq_lens.shape[0], scores.shape[1], batch.max_query <= 1
        heads, dim = max(triton.next_power_of_2(facts.heads), 16), max(triton.next_power_of_2(facts.dim), 16)
        block_q = 1 if single else 16
        # Products of float32 are without matrix instructions, whose factors a thread has whole rows of.
        large = not single and shared_memory(q.device) >= LARGE
        tile = 32 if q.element_size() > 2 else 256 if large else 128
        blocks, most = _blocks(begin, end, requests, block_q, single)
        stages = fitting_stages(q.device, min(2, most_stages(q.device)), heads * dim * q.element_size(), tile * dim * q.element_size())
        _score[(blocks, triton.cdiv(length, tile))](
            q, weights, as_stored(pages), scores, batch.query_start, batch.seq_lens, batch.block_table, requests, most, begin, end, length,
            q.stride(0), q.stride(1), weights.stride(0), pages.stride(0), pages.stride(1), batch.block_table.stride(0),
            HEADS=facts.heads, BLOCK_H=heads, D=facts.dim, BLOCK_D=dim, PAGE=facts.page_size, TILE=tile, BLOCK_Q=block_q, SINGLE=single,
            HALF=facts.kv_dtype == "float8_e4m3fn" and facts.dtype != "float32", STAGES=stages, num_warps=8 if tile == 256 else 4,
            num_stages=stages, **early(q.device),
        )  # fmt: skip


def _blocks(begin: int, end: int, requests: int, block_q: int, single: bool) -> tuple[int, int]:
    """Programs for tokens [begin, end), and the number of blocks up to theirs."""
    if single:
        return requests, requests
    blocks = (end - 1) // block_q - begin // block_q + 1 + requests
    return blocks, begin // block_q + blocks
