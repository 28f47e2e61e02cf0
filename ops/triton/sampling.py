"""Sampling in Triton without a sort: one pass over the logits gives partial sums, a second kernel draws; filters look at few logits.

The draw is that of `ops.sampling`: the inverse of the cumulated probability in token order, at one uniform number a (seed, position).
A filter is a threshold on the logits and a number of tokens that equal it. Tokens below a bound that is known beforehand (the k-th
largest of many maxima, min-p, or what all of them together cannot exceed) are dropped, and the threshold is bisected over those left.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from pagoda.hal.kernel import PlainKernel
from pagoda.ops.sampling import SamplingFacts, SamplingRows
from pagoda.ops.triton.launch import early
from pagoda.ops.triton.order import let_next_start, wait_for_last

CHUNK, GROUP, FEW, MANY, LARGEST = 2048, 256, 2048, 8192, 256
"""Logits of one program; those of one maximum; most candidates that are gathered; how many logits are looked at in one go where there are
more, so that the whole row is searched; and how many of the largest, at least, are tried for top-p alone."""


@triton.jit
def _partials(logits, temperature, top, total, best, tops, l_r, GREEDY: tl.constexpr, VOCAB: tl.constexpr, CHUNKS: tl.constexpr,
              CHUNK: tl.constexpr, GROUP: tl.constexpr, GROUPED: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """Of one chunk of one row: maximum and its first token, sum of weights below the maximum (NaN if any logit is), maxima of groups."""
    let_next_start(EARLY)
    wait_for_last(EARLY)
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row * l_r + token, mask=token < VOCAB, other=float("-inf")).to(tl.float32)
    here = row * CHUNKS + chunk
    high = tl.max(x, 0)
    tl.store(top + here, high)
    tl.store(best + here, chunk * CHUNK + tl.argmax(x, 0))
    if GREEDY:
        tl.store(total + here, tl.sum(tl.where(x != x, x, 0.0), 0))
    else:
        heat = tl.maximum(tl.load(temperature + row), 1e-5)
        safe = tl.where(high == float("-inf"), 0.0, high)
        tl.store(total + here, tl.sum(tl.exp((x - safe) / heat), 0))
    if GROUPED:
        groups = tl.max(tl.reshape(x, [CHUNK // GROUP, GROUP]), 1)
        tl.store(tops + here * (CHUNK // GROUP) + tl.arange(0, CHUNK // GROUP), groups)


@triton.jit
def _mix(x):
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def _uniform(seed, counter):
    """As `ops.sampling.uniform`, in 32-bit arithmetic."""
    state = _mix((seed & 0xFFFFFFFF).to(tl.uint32) ^ 0x9E3779B9)
    state = _mix(state ^ ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32))
    state = _mix(state ^ (counter & 0xFFFFFFFF).to(tl.uint32))
    state = _mix(state ^ ((counter >> 32) & 0xFFFFFFFF).to(tl.uint32))
    return _mix(state).to(tl.float64) / 4294967296.0


@triton.jit
def _merged(top, total, row, heat, CHUNKS: tl.constexpr, BLOCK: tl.constexpr):
    """The row's maximum, the weights of its chunks relative to it, and whether any of its logits is NaN."""
    chunk = tl.arange(0, BLOCK)
    inside = chunk < CHUNKS
    highs = tl.load(top + row * CHUNKS + chunk, mask=inside, other=float("-inf"))
    sums = tl.load(total + row * CHUNKS + chunk, mask=inside, other=0.0)
    bad = tl.max((sums != sums).to(tl.int32), 0) > 0
    high = tl.max(highs, 0)
    safe = tl.where(high == float("-inf"), 0.0, high)
    weights = tl.where(highs == float("-inf"), 0.0, sums * tl.exp((highs - safe) / heat))
    return high, weights, bad


@triton.jit
def _draw_in(weight, token, target):
    """The first token where the cumulated weights pass `target`; the last with any weight where rounding lets none pass."""
    passed = (tl.cumsum(weight.to(tl.float64), 0) > target) & (weight > 0.0)
    first = tl.min(tl.where(passed, token, 2147483647), 0)
    last = tl.max(tl.where(weight > 0.0, token, 0), 0)
    return tl.where(first == 2147483647, last, first)


@triton.jit
def _plain(logits, row, l_r, high, heat, weights, u, VOCAB: tl.constexpr, CHUNK: tl.constexpr):
    """A draw from the whole row, of which it reads one chunk."""
    wide = weights.to(tl.float64)
    upto = tl.cumsum(wide, 0)
    target = u * tl.sum(wide, 0)
    chunk = tl.sum((upto <= target).to(tl.int32), 0)
    chunk = tl.minimum(chunk, (VOCAB - 1) // CHUNK)
    before = tl.sum(tl.where(tl.arange(0, weights.shape[0]) < chunk, wide, 0.0), 0)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row * l_r + token, mask=token < VOCAB, other=float("-inf")).to(tl.float32)
    return _draw_in(tl.exp((x - high) / heat), token, target - before)


@triton.jit
def _first_best(top, best, row, CHUNKS: tl.constexpr, BLOCK: tl.constexpr):
    """Token of the row's maximum, the first of equal ones."""
    chunk = tl.arange(0, BLOCK)
    highs = tl.load(top + row * CHUNKS + chunk, mask=chunk < CHUNKS, other=float("-inf"))
    return tl.load(best + row * CHUNKS + tl.argmax(highs, 0))


@triton.jit
def _pick(logits, temperature, seed, position, top, total, best, tokens, bad, l_r, GREEDY: tl.constexpr, VOCAB: tl.constexpr,
          CHUNKS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    let_next_start(EARLY)
    wait_for_last(EARLY)
    row = tl.program_id(0).to(tl.int64)
    heat = 1.0 if GREEDY else tl.maximum(tl.load(temperature + row), 1e-5)
    high, weights, broken = _merged(top, total, row, heat, CHUNKS, BLOCK)
    token = _first_best(top, best, row, CHUNKS, BLOCK)
    if not GREEDY:
        u = _uniform(tl.load(seed + row), tl.load(position + row))
        drawn = _plain(logits, row, l_r, high, heat, weights, u, VOCAB, CHUNK)
        token = tl.where(tl.load(temperature + row) > 0.0, drawn, token)
    tl.store(tokens + row, tl.where(broken, 0, token).to(tl.int64))
    tl.store(bad + row, broken)


@triton.jit
def _key(x):
    """An integer that orders as the number does; both zeros are one."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _number(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _middle(low, high):
    """Between two integers whose sum may not fit."""
    return (low & high) + ((low ^ high) >> 1)


@triton.jit
def _load_block(values, start, count, BLOCK: tl.constexpr):
    place = start + tl.arange(0, BLOCK)
    return tl.load(values + place, mask=place < count, other=float("-inf")).to(tl.float32), place < count


@triton.jit
def _above(values, count, bound, high, heat, BLOCK: tl.constexpr):
    """How many of `count` numbers have keys above `bound`, and their weight."""
    number = tl.zeros([], tl.int32)
    mass = tl.zeros([], tl.float64)
    for start in range(0, count, BLOCK):
        x, inside = _load_block(values, start, count, BLOCK)
        over = inside & (_key(x) > bound)
        number += tl.sum(over.to(tl.int32), 0)
        mass += tl.sum(tl.where(over, tl.exp((x - high) / heat), 0.0), 0).to(tl.float64)
    return number, mass


@triton.jit
def _by_count(values, count, wanted, low, high, heat, BLOCK: tl.constexpr):
    """The smallest bound above `low` with fewer than `wanted` keys above it: the key of the last token that is kept."""
    upper = _key(high)
    while low < upper - 1:
        bound = _middle(low, upper)
        number, _ = _above(values, count, bound, high, heat, BLOCK)
        low = tl.where(number >= wanted, bound, low)
        upper = tl.where(number >= wanted, upper, bound)
    return upper


@triton.jit
def _by_mass(values, count, wanted, low, high, heat, BLOCK: tl.constexpr):
    """The smallest bound above `low` with less than the mass `wanted` above it."""
    upper = _key(high)
    while low < upper - 1:
        bound = _middle(low, upper)
        _, mass = _above(values, count, bound, high, heat, BLOCK)
        low = tl.where(mass >= wanted, bound, low)
        upper = tl.where(mass >= wanted, upper, bound)
    return upper


@triton.jit
def _kth_of_groups(tops, row, k, high, GROUPS: tl.constexpr, BLOCK: tl.constexpr):
    """The k-th largest of the groups' maxima: at least k logits are not below it. −inf where there are fewer groups."""
    place = tl.arange(0, BLOCK)
    keys = _key(tl.load(tops + row * GROUPS + place, mask=place < GROUPS, other=float("-inf")))
    keys = tl.where(place < GROUPS, keys, -2147483648)
    low = tl.full([], -2147483648, tl.int32)
    upper = _key(high)
    while low < upper - 1:
        bound = _middle(low, upper)
        enough = tl.sum((keys > bound).to(tl.int32), 0) >= k
        low = tl.where(enough, bound, low)
        upper = tl.where(enough, upper, bound)
    return tl.where(k <= GROUPS, _number(upper), float("-inf"))


@triton.jit
def _gather(logits, top, row, l_r, floor, few, ids, VOCAB: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr,
            FEW: tl.constexpr):  # fmt: skip
    """Write the logits from `floor` on, and their tokens, in token order; how many there are, more than FEW meaning too many."""
    count = tl.zeros([], tl.int32)
    for chunk in range(CHUNKS):
        if (tl.load(top + row * CHUNKS + chunk) >= floor) & (count <= FEW):
            token = chunk * CHUNK + tl.arange(0, CHUNK)
            x = tl.load(logits + row * l_r + token, mask=token < VOCAB, other=float("-inf")).to(tl.float32)
            kept = (x >= floor) & (token < VOCAB)
            place = count + tl.cumsum(kept.to(tl.int32), 0) - 1
            tl.store(few + row * FEW + place, x, mask=kept & (place < FEW))
            tl.store(ids + row * FEW + place, token, mask=kept & (place < FEW))
            count += tl.sum(kept.to(tl.int32), 0)
    return count


@triton.jit
def _cut(values, count, floor, low, k, p, mass, high, heat, LIMITED: tl.constexpr, BLOCK: tl.constexpr):
    """Key of the last kept token, how many that equal it are kept, and the kept mass.

    `floor` is that of min-p, `low` what no kept key is below; `mass` the weight of all, of use where neither min-p nor top-k cuts.
    """
    bound = tl.maximum(low, -2147483647)
    kept = tl.full([], 2147483647, tl.int32)
    if LIMITED:
        allowed, mass = _above(values, count, _key(floor) - 1, high, heat, BLOCK)
        kept = tl.minimum(allowed, k)
        bound = _by_count(values, count, kept, bound - 1, high, heat, BLOCK)
        over, above = _above(values, count, bound, high, heat, BLOCK)
        mass = above + (kept - over) * tl.exp((_number(bound) - high) / heat).to(tl.float64)
    if p < 1.0:
        wanted = p.to(tl.float64) * mass
        bound = _by_mass(values, count, wanted, bound - 1, high, heat, BLOCK)
        over, above = _above(values, count, bound, high, heat, BLOCK)
        each = tl.exp((_number(bound) - high) / heat).to(tl.float64)
        equal = tl.where(each > 0.0, tl.minimum(tl.ceil((wanted - above) / each), 2147483647.0 - over), 1.0).to(tl.int32)
        kept = tl.minimum(kept, over + tl.maximum(equal, 1))
    over, above = _above(values, count, bound, high, heat, BLOCK)
    there, _ = _above(values, count, bound - 1, high, heat, BLOCK)
    equal = tl.minimum(kept, there) - over
    mass = above
    if equal > 0:
        mass += equal * tl.exp((_number(bound) - high) / heat).to(tl.float64)
    return bound, equal, mass


@triton.jit
def _draw_kept(values, count, bound, equal, mass, u, high, heat, BLOCK: tl.constexpr):
    """Where in `values` the draw falls, among keys above `bound` and the first `equal` at it."""
    target = u * mass
    done = tl.zeros([], tl.float64)
    seen = tl.zeros([], tl.int32)
    found = tl.full([], 2147483647, tl.int32)
    last = tl.zeros([], tl.int32)
    for start in range(0, count, BLOCK):
        x, inside = _load_block(values, start, count, BLOCK)
        same = (inside & (_key(x) == bound)).to(tl.int32)
        kept = inside & ((_key(x) > bound) | ((same > 0) & (seen + tl.cumsum(same, 0) <= equal)))
        weight = tl.where(kept, tl.exp((x - high) / heat), 0.0).to(tl.float64)
        place = start + tl.arange(0, BLOCK)
        passed = (done + tl.cumsum(weight, 0) > target) & (weight > 0.0)
        found = tl.minimum(found, tl.min(tl.where(passed, place, 2147483647), 0))
        last = tl.maximum(last, tl.max(tl.where(weight > 0.0, place, 0), 0))
        done += tl.sum(weight, 0)
        seen += tl.sum(same, 0)
    return tl.where(found == 2147483647, last, found)


@triton.jit
def _filtered(logits, top, tops, few, ids, row, l_r, k, p, min_p, u, high, heat, mass, VOCAB: tl.constexpr, CHUNKS: tl.constexpr,
              CHUNK: tl.constexpr, GROUPS: tl.constexpr, GROUPS_BLOCK: tl.constexpr, FEW: tl.constexpr, MANY: tl.constexpr,
              LARGEST: tl.constexpr):  # fmt: skip
    """A draw from what min-p, top-k and top-p leave of a row."""
    floor = high + tl.log(min_p) * heat
    limited = (k > 0) | (min_p > 0.0)
    k = tl.where(k > 0, k, VOCAB)
    # For top-p alone: most often some of the largest are enough, which shows when they are there.
    wanted = tl.where(limited, k, LARGEST)
    bound = tl.maximum(floor, _kth_of_groups(tops, row, wanted, high, GROUPS, GROUPS_BLOCK))
    count = _gather(logits, top, row, l_r, bound, few, ids, VOCAB, CHUNKS, CHUNK, FEW)
    tl.debug_barrier()
    few += row * FEW
    enough = count <= FEW
    if not limited:
        _, there = _above(few, tl.minimum(count, FEW), -2147483648, high, heat, FEW)
        enough = enough & (there > 1.000001 * p.to(tl.float64) * mass)
    if enough:
        if limited:
            cut, equal, kept = _cut(few, count, floor, _key(bound), k, p, mass, high, heat, True, FEW)
        else:
            cut, equal, kept = _cut(few, count, floor, _key(bound), k, p, mass, high, heat, False, FEW)
        token = tl.load(ids + row * FEW + _draw_kept(few, count, cut, equal, kept, u, high, heat, FEW))
    else:
        logits += row * l_r
        if limited:
            cut, equal, kept = _cut(logits, VOCAB, floor, _key(bound), k, p, mass, high, heat, True, MANY)
        else:
            # All that lies below weighs less than what top-p may drop.
            bound = high + tl.log((1.0 - p) * mass.to(tl.float32) / VOCAB * 0.999) * heat
            cut, equal, kept = _cut(logits, VOCAB, floor, _key(bound), k, p, mass, high, heat, False, MANY)
        token = _draw_kept(logits, VOCAB, cut, equal, kept, u, high, heat, MANY)
    return token


@triton.jit
def _pick_filtered(logits, temperature, top_k, top_p, min_p, seed, position, top, total, best, tops, few, ids, tokens, bad, l_r,
                   VOCAB: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr,
                   GROUPS_BLOCK: tl.constexpr, FEW: tl.constexpr, MANY: tl.constexpr, LARGEST: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    hot = tl.load(temperature + row)
    heat = tl.maximum(hot, 1e-5)
    k, p, least = tl.load(top_k + row), tl.load(top_p + row), tl.load(min_p + row)
    high, weights, broken = _merged(top, total, row, heat, CHUNKS, BLOCK)
    u = _uniform(tl.load(seed + row), tl.load(position + row))
    token = _first_best(top, best, row, CHUNKS, BLOCK).to(tl.int32)
    if (hot > 0.0) & (broken == 0) & (high > float("-inf")):
        if (k > 0) | (p < 1.0) | (least > 0.0):
            mass = tl.sum(weights.to(tl.float64), 0)
            token = _filtered(logits, top, tops, few, ids, row, l_r, k, p, least, u, high, heat, mass,
                              VOCAB, CHUNKS, CHUNK, GROUPS, GROUPS_BLOCK, FEW, MANY, LARGEST)  # fmt: skip
        else:
            token = _plain(logits, row, l_r, high, heat, weights, u, VOCAB, CHUNK)
    tl.store(tokens + row, tl.where(broken, 0, token).to(tl.int64))
    tl.store(bad + row, broken)


class Sample(PlainKernel):
    """`run(logits, rows)`, as in `ops.sampling.SampleReference`."""

    facts: SamplingFacts

    def run(self, logits: torch.Tensor, rows: SamplingRows) -> tuple[torch.Tensor, torch.Tensor]:
        if logits.stride(-1) != 1:
            logits = logits.contiguous()
        count, vocab = logits.shape
        tokens = torch.empty(count, dtype=torch.int64, device=logits.device)
        bad = torch.empty(count, dtype=torch.bool, device=logits.device)
        if count == 0:
            return tokens, bad
        chunks, knobs = triton.cdiv(vocab, CHUNK), (rows.temperature, rows.seed, rows.position)
        if rows.all_greedy:
            knobs = (logits, logits, logits)
        grouped = rows.any_filter and not rows.all_greedy
        top, total = (torch.empty(count, chunks, dtype=torch.float32, device=logits.device) for _ in range(2))
        best = torch.empty(count, chunks, dtype=torch.int32, device=logits.device)
        tops = torch.empty(count, chunks * (CHUNK // GROUP), dtype=torch.float32, device=logits.device) if grouped else top
        _partials[(count, chunks)](
            logits, knobs[0], top, total, best, tops, logits.stride(0), GREEDY=rows.all_greedy, VOCAB=vocab, CHUNKS=chunks,
            CHUNK=CHUNK, GROUP=GROUP, GROUPED=grouped, num_warps=4, **early(logits.device),
        )  # fmt: skip
        parts = (top, total, best)
        if grouped:
            self._pick_filtered(logits, rows, parts, tops, tokens, bad)
        else:
            _pick[(count,)](
                logits, *knobs, *parts, tokens, bad, logits.stride(0), GREEDY=rows.all_greedy,
                VOCAB=vocab, CHUNKS=chunks, CHUNK=CHUNK, BLOCK=triton.next_power_of_2(chunks), num_warps=4, **early(logits.device),
            )  # fmt: skip
        return tokens, bad

    def _pick_filtered(self, logits: torch.Tensor, rows: SamplingRows, parts: Any, tops: torch.Tensor, tokens: torch.Tensor,
                       bad: torch.Tensor) -> None:  # fmt: skip
        count, vocab = logits.shape
        groups = tops.shape[1]
        few = torch.empty(count, FEW, dtype=torch.float32, device=logits.device)
        ids = torch.empty(count, FEW, dtype=torch.int32, device=logits.device)
        _pick_filtered[(count,)](
            logits, rows.temperature, rows.top_k, rows.top_p, rows.min_p, rows.seed, rows.position, *parts, tops, few, ids, tokens, bad,
            logits.stride(0), VOCAB=vocab, CHUNKS=parts[0].shape[1], CHUNK=CHUNK, BLOCK=triton.next_power_of_2(parts[0].shape[1]),
            GROUPS=groups, GROUPS_BLOCK=triton.next_power_of_2(groups), FEW=FEW, MANY=MANY, LARGEST=min(LARGEST, groups), num_warps=16,
        )  # fmt: skip
