"""The Triton programs of paged attention: prompts and split decodes, beginnings that decodes share (arXiv:2402.05099), merging of splits.

A program takes a block of query tokens of one request with all the query heads of one KV head, so K and V are read once per group.
Splits of a decode are merged by the last of them to arrive, in the order of their keys, or by a kernel of its own where they are many.
Tiles that every row of the block sees whole need no mask, and run in a loop of their own. Where a tile is a page, or a whole part of
one, K and V come through tensor descriptors, which Hopper and later load without the threads' help.
"""

from __future__ import annotations

import triton
import triton.language as tl
from pagoda.ops.triton.float8 import numbers
from pagoda.ops.triton.order import let_next_start, wait_for_last

STEP = ["query_start", "seq_lens", "table", "shared"]
"""Arrays of a step, which begin anywhere: a compiled kernel must not depend on it."""
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def find_request(query_start, block, num_requests, BLOCK_Q: tl.constexpr):
    """Largest r with query_start[r] // BLOCK_Q + r ≤ block: request r owns blocks from there on."""
    low, high = 0, num_requests
    while low < high:
        middle = (low + high) // 2
        if tl.load(query_start + middle) // BLOCK_Q + middle <= block:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit(do_not_specialize=["bounds", "tokens", "width"], do_not_specialize_on_alignment=["query_start"])
def zero_padding(out, query_start, bounds, tokens, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Tokens from the last bound on belong to no request: they become 0."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    used = tl.load(query_start + bounds - 1)
    if (tl.program_id(0) + 1) * ROWS <= used:
        return
    mask = ((row >= used) & (row < tokens))[:, None]
    for column in range(0, width, BLOCK):
        place = column + tl.arange(0, BLOCK)[None, :]
        tl.store(
            out + row.to(tl.int64)[:, None] * width + place, tl.zeros([ROWS, BLOCK], out.dtype.element_ty), mask=mask & (place < width)
        )


@triton.jit
def block_of(query_start, num_requests, num_blocks, BLOCK_Q: tl.constexpr, SINGLE: tl.constexpr):
    """(request, its first token, its query tokens, the first of them that is this program's): nothing to do where the last is not below
    the one before. SINGLE: a block is a request, and those with other than one query token are left alone. Later blocks see more, and
    start first.
    """
    if SINGLE:
        request = tl.program_id(0)
        first = tl.load(query_start + request)
        queries = tl.load(query_start + request + 1) - first
        start = tl.where(queries == 1, 0, queries)
    else:
        block = num_blocks - 1 - tl.program_id(0)
        request = find_request(query_start, block, num_requests, BLOCK_Q)
        first = tl.load(query_start + request)
        queries = tl.load(query_start + request + 1) - first
        start = (block - (first // BLOCK_Q + request)) * BLOCK_Q
    return request, first, queries, start


@triton.jit
def rows_of(start, queries, group, GROUP: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_M: tl.constexpr):
    """(query token, head, whether there is one) of each row of a block that begins at query token `start`."""
    m = tl.arange(0, BLOCK_M)
    row, head = start + m // GROUP, group * GROUP + m % GROUP
    return row, head, (row < queries) & (m < BLOCK_Q * GROUP)


@triton.jit
def keep(part, lse, base, column, acc, total, top, there, valid, WIDTH: tl.constexpr):
    """A running softmax whose keys are not all there yet, in slot `base` of each row."""
    tl.store(part + base[:, None] * WIDTH + column[None, :], acc, mask=there)
    tl.store(lse + base * 2, top, mask=valid)
    tl.store(lse + base * 2 + 1, total, mask=valid)


@triton.jit
def divided(acc, total, top, sinks, head, valid, SINKS: tl.constexpr):
    """What a running softmax comes to, sinks included; zero where it saw nothing."""
    if SINKS:
        sink = tl.load(sinks + head, mask=valid, other=0.0).to(tl.float32) * LOG2E
        safe = tl.maximum(top, sink)
        shrink = tl.exp2(top - safe)
        acc = acc * shrink[:, None]
        total = total * shrink + tl.exp2(sink - safe)
    return acc / tl.where(total == 0.0, 1.0, total)[:, None]


@triton.jit
def halved(query):
    """In float16: what float8 pages hold becomes that in one instruction for two numbers, and bfloat16 in several."""
    return tl.minimum(tl.maximum(query.to(tl.float32), -65504.0), 65504.0).to(tl.float16)


@triton.jit
def _tile(pages, table, first, kv_head, begin, high, p_p, p_t, p_h,
          PAGE: tl.constexpr, TILE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, DESCRIPTOR: tl.constexpr,
          WHOLE: tl.constexpr):  # fmt: skip
    """Keys or values [TILE, BLOCK_D] from position `first` on; what lies outside [begin, high) is 0 unless WHOLE."""
    j = first + tl.arange(0, TILE)
    inside = (j >= begin) & (j < high)
    if DESCRIPTOR:
        page = tl.load(table + first // PAGE)
        tile = pages.load([page, kv_head, first % PAGE, 0]).reshape(TILE, BLOCK_D)
        if not WHOLE:
            tile = tl.where(inside[:, None], tile, tl.zeros_like(tile))
    else:
        d = tl.arange(0, BLOCK_D)
        if WHOLE and TILE <= PAGE and PAGE % TILE == 0:
            page = tl.load(table + first // PAGE).to(tl.int64)
            offsets = page * p_p + kv_head * p_h + (first % PAGE + tl.arange(0, TILE)) * p_t
        else:
            pages_j = tl.load(table + j // PAGE, mask=inside, other=0).to(tl.int64)
            offsets = pages_j * p_p + (j % PAGE) * p_t + kv_head * p_h
        where = pages + offsets[:, None] + d[None, :]
        if not WHOLE:
            tile = tl.load(where, mask=inside[:, None] & (d < D)[None, :], other=0.0)
        elif D == BLOCK_D:
            tile = tl.load(where)
        else:
            tile = tl.load(where, mask=(d < D)[None, :], other=0.0)
    return tile


@triton.jit
def walk(acc, total, top, query, k_pages, v_pages, table, low, stop, begin, high, kv_head, position, valid, slope, scale, softcap,
          bias, far, kp_p, kp_t, kp_h, vp_p, vp_t, vp_h,
          TILE: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
          WINDOW: tl.constexpr, CHUNK: tl.constexpr, CAUSAL: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
          BIAS: tl.constexpr, DESCRIPTOR: tl.constexpr, WHOLE: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """Tiles [low, stop) joined to a block's running softmax; WHOLE where every row sees all of each. `bias`: of each row, the number for
    distance 0; `far`: the last distance that has one."""
    for first in tl.range(low, stop, TILE, num_stages=STAGES):
        key = _tile(k_pages, table, first, kv_head, begin, high, kp_p, kp_t, kp_h, PAGE, TILE, D, BLOCK_D, DESCRIPTOR, WHOLE)
        logits = tl.dot(query, tl.trans(numbers(key, query.dtype)), input_precision="ieee")
        j = first + tl.arange(0, TILE)
        if SOFTCAP:
            logits = logits * scale
            logits = (softcap * LOG2E) * (1.0 - 2.0 / (tl.exp2(2.0 * LOG2E * logits / softcap) + 1.0))
        else:
            logits = logits * (scale * LOG2E)
        if ALIBI:
            logits -= (slope * LOG2E)[:, None] * (position[:, None] - j[None, :])
        if BIAS:
            distance = tl.minimum(tl.maximum(position[:, None] - j[None, :], 0), far)
            logits += tl.load(bias[:, None] + distance) * LOG2E
        if not WHOLE:
            seen = ((j >= begin) & (j < high))[None, :] & valid[:, None]
            if CAUSAL:
                seen &= j[None, :] <= position[:, None]
            if WINDOW > 0:
                seen &= position[:, None] - j[None, :] < WINDOW
            if CHUNK > 0:
                seen &= position[:, None] // CHUNK == j[None, :] // CHUNK
            logits = tl.where(seen, logits, float("-inf"))
        new_top = tl.maximum(top, tl.max(logits, 1))
        if WHOLE:
            safe = new_top
        else:
            safe = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight = tl.exp2(logits - safe[:, None])
        shrink = tl.exp2(top - safe)
        total = total * shrink + tl.sum(weight, 1)
        value = _tile(v_pages, table, first, kv_head, begin, high, vp_p, vp_t, vp_h, PAGE, TILE, DV, BLOCK_DV, DESCRIPTOR, WHOLE)
        acc = acc * shrink[:, None]
        acc = tl.dot(weight.to(query.dtype), numbers(value, query.dtype), acc, input_precision="ieee")
        top = new_top
    return acc, total, top


@triton.jit
def join(part, lse, out, sinks, request, kv_head, slots, filled, o_h, HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_H: tl.constexpr,
         BLOCK_S: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, SINKS: tl.constexpr):  # fmt: skip
    """The first `filled` of the slots of each head of one group, BLOCK_S at a time, as `out`, which is the token's. Other programs wrote
    them: they are read past this processor's own cache."""
    h, s, dv = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_DV)
    head, there = kv_head * GROUP + h, h < GROUP
    top = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, BLOCK_DV], tl.float32)
    for first in range(0, filled, BLOCK_S):
        slot = ((request.to(tl.int64) * HEADS + head) * slots + first)[:, None] + s[None, :]
        inside = there[:, None] & (first + s < filled)[None, :]
        tops = tl.load(lse + slot * 2, mask=inside, other=float("-inf"), cache_modifier=".cg")
        totals = tl.load(lse + slot * 2 + 1, mask=inside, other=0.0, cache_modifier=".cg")
        rows = tl.load(part + slot[:, :, None] * DV + dv[None, None, :], mask=inside[:, :, None] & (dv < DV)[None, None, :], other=0.0,
                       cache_modifier=".cg")  # fmt: skip
        new = tl.maximum(top, tl.max(tops, 1))
        safe = tl.where(new == float("-inf"), 0.0, new)
        weight, shrink = tl.exp2(tops - safe[:, None]), tl.exp2(top - safe)
        # Slots without a key hold anything.
        total = total * shrink + tl.sum(tl.where(weight != 0.0, totals * weight, 0.0), 1)
        rows = tl.where((weight != 0.0)[:, :, None], rows * weight[:, :, None], 0.0)
        acc = acc * shrink[:, None] + tl.sum(rows, 1)
        top = new
    result = divided(acc, total, top, sinks, head, there, SINKS)
    tl.store(out + head[:, None] * o_h + dv[None, :], result.to(out.dtype.element_ty), mask=there[:, None] & (dv < DV)[None, :])


@triton.jit(do_not_specialize=["num_requests", "num_blocks", "table_r", "splits", "offset", "slots"], do_not_specialize_on_alignment=STEP)
def attend(q, k_pages, v_pages, out, part, lse, arrived, query_start, seq_lens, table, shared, sinks, slopes, biases,
           scale, softcap, num_requests, num_blocks, splits, offset, slots, distances, q_t, q_h, o_t, o_h,
           kp_p, kp_t, kp_h, vp_p, vp_t, vp_h, table_r,
           HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_M: tl.constexpr, SINGLE: tl.constexpr,
           TILE: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr,
           BLOCK_DV: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, CAUSAL: tl.constexpr,
           SOFTCAP: tl.constexpr, SINKS: tl.constexpr, ALIBI: tl.constexpr, BIAS: tl.constexpr, PARTIAL: tl.constexpr,
           JOIN: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_S: tl.constexpr,
           FEWEST: tl.constexpr, DESCRIPTOR: tl.constexpr, STAGES: tl.constexpr, HALF: tl.constexpr,
           EARLY: tl.constexpr):  # fmt: skip
    """Blocks × KV heads × splits. Requests with fewer than FEWEST query tokens are left alone. PARTIAL results lie by request, this
    launch's in slots `offset` … of `slots`; offset > 0: other slots have the keys that `shared` counts. JOIN: the last program of a
    request and KV head to arrive merges them; `arrived` counts the others, and is 0 again afterwards.
    """
    let_next_start(EARLY)
    kv_head, split = tl.program_id(1), tl.program_id(2)
    request, first, queries, start = block_of(query_start, num_requests, num_blocks, BLOCK_Q, SINGLE)
    seq_len = tl.load(seq_lens + request)
    wait_for_last(EARLY)  # arrays of the step were there before; q, K and V are the last kernel's
    if (start >= queries) | (queries < FEWEST):
        return
    row, head, valid = rows_of(start, queries, kv_head, GROUP, BLOCK_Q, BLOCK_M)
    position = seq_len - queries + row
    token = (first + row).to(tl.int64)
    d, dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    query = tl.load(q + token[:, None] * q_t + head[:, None] * q_h + d[None, :], mask=valid[:, None] & (d < D)[None, :], other=0.0)
    if HALF:
        query = halved(query)
    if ALIBI:
        slope = tl.load(slopes + head, mask=valid, other=0.0).to(tl.float32)
    else:
        slope = tl.zeros([BLOCK_M], tl.float32)
    bias = biases + head * distances if BIAS else biases

    lowest = seq_len - queries + start
    highest = tl.minimum(lowest + BLOCK_Q - 1, seq_len - 1)
    last = highest + 1 if CAUSAL else seq_len
    begin, whole = 0, 0
    if WINDOW > 0:
        begin, whole = tl.maximum(lowest - WINDOW + 1, 0), tl.maximum(highest - WINDOW + 1, 0)
    if CHUNK > 0:
        begin, whole = tl.maximum(begin, lowest // CHUNK * CHUNK), tl.maximum(whole, highest // CHUNK * CHUNK)
    if PARTIAL:
        begin = tl.maximum(begin, tl.load(shared + 1 + request, mask=offset > 0, other=0))
    # Keys before `begin` may lie in dropped pages, whose content is anything: they are masked even inside the first tile.
    first_tile = begin // TILE * TILE
    per_split = tl.cdiv(tl.cdiv(last - first_tile, TILE), splits) * TILE
    low = first_tile + split * per_split
    if JOIN:  # splits that have no keys are not waited for, except the first
        used = tl.maximum(tl.cdiv(last - first_tile, tl.maximum(per_split, TILE)), 1)
        if split >= used:
            return
    high = tl.minimum(low + per_split, last)
    seen_by_all = (lowest + 1 if CAUSAL else seq_len) // TILE * TILE
    from_all = tl.maximum(low, tl.minimum(tl.cdiv(whole, TILE) * TILE, high))
    to_all = tl.maximum(from_all, tl.minimum(seen_by_all, high))

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    table += request * table_r
    if WINDOW > 0 or CHUNK > 0:
        acc, total, top = walk(acc, total, top, query, k_pages, v_pages, table, low, from_all, begin, high, kv_head, position, valid,
                                slope, scale, softcap, bias, distances - 1, kp_p, kp_t, kp_h, vp_p, vp_t, vp_h, TILE, PAGE, D, DV,
                                BLOCK_D, BLOCK_DV, WINDOW, CHUNK, CAUSAL, SOFTCAP, ALIBI, BIAS, DESCRIPTOR, False,
                                STAGES)  # fmt: skip
    acc, total, top = walk(acc, total, top, query, k_pages, v_pages, table, from_all, to_all, begin, high, kv_head, position, valid, slope,
                            scale, softcap, bias, distances - 1, kp_p, kp_t, kp_h, vp_p, vp_t, vp_h, TILE, PAGE, D, DV, BLOCK_D, BLOCK_DV,
                            WINDOW, CHUNK, CAUSAL, SOFTCAP, ALIBI, BIAS, DESCRIPTOR, True, STAGES)  # fmt: skip
    acc, total, top = walk(acc, total, top, query, k_pages, v_pages, table, to_all, high, begin, high, kv_head, position, valid, slope,
                            scale, softcap, bias, distances - 1, kp_p, kp_t, kp_h, vp_p, vp_t, vp_h, TILE, PAGE, D, DV, BLOCK_D, BLOCK_DV,
                            WINDOW, CHUNK, CAUSAL, SOFTCAP, ALIBI, BIAS, DESCRIPTOR, False, 1)  # fmt: skip

    alone = not PARTIAL
    if JOIN:
        alone = (used == 1) & (offset == 0)
    if alone:
        result = divided(acc, total, top, sinks, head, valid, SINKS)
        tl.store(out + token[:, None] * o_t + head[:, None] * o_h + dv[None, :], result.to(out.dtype.element_ty),
                 mask=valid[:, None] & (dv < DV)[None, :])  # fmt: skip
    else:
        base = (request.to(tl.int64) * HEADS + head) * slots + offset + split
        keep(part, lse, base, dv, acc, total, top, valid[:, None] & (dv < DV)[None, :] & (low < high), valid, DV)
        if JOIN:
            count = arrived + request * (HEADS // GROUP) + kv_head
            # All threads' results are written before this one counts; who counts last sees everybody's.
            tl.debug_barrier()
            if tl.atomic_add(count, 1, sem="acq_rel", scope="gpu") == used - 1:
                tl.store(count, 0)
                join(part, lse, out + first.to(tl.int64) * o_t, sinks, request, kv_head, slots, offset + used, o_h, HEADS, GROUP, BLOCK_H,
                     BLOCK_S, DV, BLOCK_DV, SINKS)  # fmt: skip


@triton.jit(do_not_specialize=["rows", "table_r", "splits", "slots"], do_not_specialize_on_alignment=["query_start", "table", "shared"])
def attend_shared(q, k_pages, v_pages, part, lse, query_start, table, shared, scale, softcap, rows, splits, slots, q_t, q_h,
                  kp_p, kp_t, kp_h, vp_p, vp_t, vp_h, table_r,
                  HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, TILE: tl.constexpr, PAGE: tl.constexpr,
                  D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, SOFTCAP: tl.constexpr,
                  DESCRIPTOR: tl.constexpr, STAGES: tl.constexpr, HALF: tl.constexpr):  # fmt: skip
    """Blocks of decodes × KV heads × splits: the keys that they share, read once for a block, into the first `splits` of `slots`."""
    block, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    m = block * BLOCK_M + tl.arange(0, BLOCK_M)
    row, head = m // GROUP, kv_head * GROUP + m % GROUP
    valid = row < rows
    leader = tl.load(shared)
    length = tl.load(shared + 1 + leader)
    member = valid & (tl.load(shared + 1 + row, mask=valid, other=0) > 0)
    token = tl.load(query_start + row, mask=valid, other=0).to(tl.int64)
    d, dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    query = tl.load(q + token[:, None] * q_t + head[:, None] * q_h + d[None, :], mask=member[:, None] & (d < D)[None, :], other=0.0)
    if HALF:
        query = halved(query)
    per_split = tl.cdiv(tl.cdiv(length, TILE), splits) * TILE
    low = split * per_split
    high = tl.minimum(low + per_split, length)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    acc, total, top = walk(acc, total, top, query, k_pages, v_pages, table + leader * table_r, low, high, 0, high, kv_head, row, member,
                            total, scale, softcap, lse, 0, kp_p, kp_t, kp_h, vp_p, vp_t, vp_h, TILE, PAGE, D, DV, BLOCK_D, BLOCK_DV, 0, 0,
                            True, SOFTCAP, False, False, DESCRIPTOR, True, STAGES)  # fmt: skip
    base = (row.to(tl.int64) * HEADS + head) * slots + split
    tl.store(part + base[:, None] * DV + dv[None, :], acc, mask=member[:, None] & (dv < DV)[None, :])
    tl.store(lse + base * 2, tl.where(member, top, float("-inf")), mask=valid)
    tl.store(lse + base * 2 + 1, tl.where(member, total, 0.0), mask=valid)


@triton.jit(do_not_specialize=["slots"], do_not_specialize_on_alignment=["query_start"])
def merge(part, lse, out, query_start, sinks, slots, o_t, o_h, HEADS: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
          MOST: tl.constexpr, BLOCK_S: tl.constexpr, SINKS: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """Requests × heads: the slots of one decode's output row, up to MOST, of which BLOCK_S are read at a time."""
    let_next_start(EARLY)
    request, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = tl.load(query_start + request).to(tl.int64)
    queries = tl.load(query_start + request + 1) - token
    wait_for_last(EARLY)
    if queries != 1:
        return
    every, s, dv = tl.arange(0, MOST), tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_DV)
    base = (request * HEADS + head) * slots
    tops = tl.load(lse + (base + every) * 2, mask=every < slots, other=float("-inf"))
    totals = tl.load(lse + (base + every) * 2 + 1, mask=every < slots, other=0.0)
    top = tl.max(tops, 0)
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2E
        top = tl.maximum(top, sink)
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(totals * tl.exp2(tops - top), 0)
    if SINKS:
        total += tl.exp2(sink - top)
    filled = tl.max(tl.where(tops == float("-inf"), 0, every + 1), 0)
    acc = tl.zeros([BLOCK_DV], tl.float32)
    for first in range(0, filled, BLOCK_S):
        slot = base + first + s
        weight = tl.exp2(tl.load(lse + slot * 2, mask=first + s < filled, other=float("-inf")) - top)
        rows = tl.load(part + slot[:, None] * DV + dv[None, :], mask=(first + s < filled)[:, None] & (dv < DV)[None, :], other=0.0)
        # Slots of rows that share nothing hold anything.
        acc += tl.sum(tl.where((weight != 0.0)[:, None], rows, 0.0) * weight[:, None], 0)
    result = acc / tl.where(total == 0.0, 1.0, total)
    tl.store(out + token * o_t + head * o_h + dv, result.to(out.dtype.element_ty), mask=dv < DV)
