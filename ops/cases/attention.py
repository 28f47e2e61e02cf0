"""Truth and inputs of `write_kv` and `paged_attention`.

Pages are shuffled, the table's tail points at page 0, and everything that a request must not read (past its length, in page 0,
in strangers' pages) is NaN: one stray read shows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from pagoda.hal.kv import stored_dim
from pagoda.ops.attention import AttentionFacts, HostLengths, PagedAttentionReference, PagedBatch, WriteKvReference
from pagoda.ops.cases.common import by_rows, draw, dtype_of, strided, tolerance
from pagoda.ops.cases.linear_fp8 import numbers_of
from pagoda.ops.op import BY_ROW, Case, Op, Part


def facts_of(
    dtype: str, heads: tuple[int, int] = (4, 2), dim: int = 64, page: int = 16, kv_dtype: str | None = None, **rest: object
) -> AttentionFacts:
    """Facts with the usual scale; `heads` are those of queries and of keys."""
    base = AttentionFacts(dtype, kv_dtype or dtype, heads[0], heads[1], dim, dim, page, dim**-0.5)
    return replace(base, **rest)  # type: ignore[arg-type]


@dataclass(frozen=True)
class _Layout:
    """How the pages of a case lie: "plain", "pool" (K and V interleaved in one pool with padding), or "heads" (head-major)."""

    kind: str = "plain"

    def pages(self, count: int, facts: AttentionFacts) -> tuple[torch.Tensor, torch.Tensor]:
        page, heads, dtype = facts.page_size, facts.num_kv_heads, dtype_of(facts.kv_dtype)
        k_size, v_size = (page * heads * stored_dim(dim, facts.kv_dtype) for dim in (facts.head_dim, facts.v_dim))
        nothing = float("nan") if dtype.is_floating_point else 127  # bytes whose scale is 3.4e38
        if self.kind == "plain":
            sizes = [stored_dim(dim, facts.kv_dtype) for dim in (facts.head_dim, facts.v_dim)]
            k, v = (torch.full((count, page, heads, size), nothing, dtype=dtype) for size in sizes)
            return k, v
        pool = torch.full((count, k_size + v_size + 24), nothing, dtype=dtype)
        k, v = pool[:, 8 : 8 + k_size], pool[:, 16 + k_size : 16 + k_size + v_size]
        if self.kind == "pool":
            return k.unflatten(1, (page, heads, -1)), v.unflatten(1, (page, heads, -1))
        return k.unflatten(1, (heads, page, -1)).transpose(1, 2), v.unflatten(1, (heads, page, -1)).transpose(1, 2)


def _first_visible(facts: AttentionFacts, position: int) -> int:
    """The earliest key that a query at `position` may see."""
    first = 0
    if facts.window is not None:
        first = max(first, position - facts.window + 1)
    if facts.chunk is not None:
        first = max(first, position // facts.chunk * facts.chunk)
    return first


def attention_case(
    gen: torch.Generator, facts: AttentionFacts, label: str, segments: list[tuple[int, int]], padding: int = 0,
    scale: float = 1.0, layout: str = "plain", slack: int = 0, rows: int = 0, known: bool = False,
) -> Case:  # fmt: skip
    """A case of `(query tokens, sequence length)` segments.

    `padding` tokens follow the last one and `rows` empty rows the last segment; host bounds are `slack` too high. `known`: the host
    has the exact lengths.
    """
    page = facts.page_size
    width = max([(length + page - 1) // page for _, length in segments], default=1) + 1
    needed = [(length + page - 1) // page for _, length in segments]
    ids = (torch.randperm(sum(needed) + 3, generator=gen) + 1).tolist()
    table = torch.zeros(len(segments) + rows, width, dtype=torch.int32)
    k_pages, v_pages = _Layout(layout).pages(len(ids) + 1, facts)
    if facts.latent:
        v_pages = k_pages[..., : facts.v_dim]
    slots: list[int] = []
    for row, (queries, length) in enumerate(segments):
        mine = [ids.pop() for _ in range(needed[row])]
        first = 0 if not facts.causal else _first_visible(facts, length - queries) // page
        for index in range(first, len(mine)):
            table[row, index] = mine[index]
            used = min(page, length - index * page)
            k_pages[mine[index], :used] = _stored(draw(gen, used, facts.num_kv_heads, facts.head_dim, scale=scale), facts)
            if not facts.latent:
                v_pages[mine[index], :used] = _stored(draw(gen, used, facts.num_kv_heads, facts.v_dim), facts)
        slots += [mine[p // page] * page + p % page for p in range(length - queries, length)]
    counts = [queries for queries, _ in segments] + [0] * rows
    batch = PagedBatch(
        query_start=torch.tensor(np.concatenate(([0], np.cumsum(counts))), dtype=torch.int32),
        seq_lens=torch.tensor([length for _, length in segments] + [0] * rows, dtype=torch.int32),
        block_table=table,
        slots=torch.tensor(slots + [0] * padding, dtype=torch.int64),
        max_query=max(counts, default=0) + slack,
        max_seq=max([length for _, length in segments], default=0) + slack,
    )
    if known:
        batch = replace(batch, lengths=HostLengths(batch.query_start.numpy(), batch.seq_lens.numpy()))
    q = draw(gen, len(slots) + padding, facts.num_heads, facts.head_dim, dtype=facts.dtype, scale=scale)
    sinks = draw(gen, facts.num_heads, dtype=facts.dtype) if facts.sinks else None
    slopes = torch.rand(facts.num_heads, generator=gen) * 0.2 if facts.alibi else None
    bias = (draw(gen, facts.num_heads, 30),) if facts.bias else ()
    return Case(label, facts, (q, k_pages, v_pages, batch, None, sinks, slopes, *bias), batch=3, clears=(2,))


def _oracle(case: Case) -> torch.Tensor:
    q, k_pages, v_pages, batch, _, sinks, slopes, *bias = case.args
    facts: AttentionFacts = case.facts
    out = np.full((q.shape[0], facts.num_heads, facts.v_dim), np.nan)
    starts = batch.query_start.tolist()
    for row, length in enumerate(batch.seq_lens.tolist()):
        table = batch.block_table[row].tolist()
        for token in range(starts[row], starts[row + 1]):
            position = length - (starts[row + 1] - token)
            keys = range(_first_visible(facts, position), position + 1 if facts.causal else length)
            where = [(table[j // facts.page_size], j % facts.page_size) for j in keys]
            k = _numbers(torch.stack([k_pages[page, offset] for page, offset in where]), facts).numpy()
            v = _numbers(torch.stack([v_pages[page, offset] for page, offset in where]), facts).numpy()
            far = position - np.array(keys)
            for head in range(facts.num_heads):
                added = _added(head, far, slopes, bias[0] if bias else None)
                out[token, head] = _one_head(facts, head, q[token, head].double().numpy(), k, v, added, sinks)
    return torch.from_numpy(out)


def _added(head: int, far: np.ndarray, slopes: torch.Tensor | None, bias: torch.Tensor | None) -> np.ndarray:
    """What joins the logits of keys so far away."""
    added = np.zeros(len(far)) if slopes is None else -float(slopes[head]) * far
    return added if bias is None else added + np.array([float(bias[head, min(max(d, 0), bias.shape[1] - 1)]) for d in far.tolist()])


def _one_head(
    facts: AttentionFacts, head: int, q: np.ndarray, k: np.ndarray, v: np.ndarray, added: np.ndarray, sinks: torch.Tensor | None
) -> np.ndarray:
    kv_head = head // (facts.num_heads // facts.num_kv_heads)
    logits = k[:, kv_head] @ q * facts.scale
    if facts.softcap is not None:
        logits = facts.softcap * np.tanh(logits / facts.softcap)
    logits = logits + added
    extra = [float(sinks[head])] if sinks is not None else []
    top = max([*logits.tolist(), *extra])
    weights = np.exp(logits - top)
    result: np.ndarray = weights @ v[:, kv_head] / (weights.sum() + sum(math.exp(e - top) for e in extra))
    return result


def _tolerance(case: Case) -> float:
    q, k_pages = case.args[:2]
    keys = k_pages.flatten()[:0] if not q.numel() else _numbers(k_pages, case.facts).nan_to_num().abs()
    keys = keys[keys < 1e30]  # what no request reads
    largest = float(q.double().abs().max() * keys.max()) if keys.numel() else 0.0
    # An error in a logit is an error in the exponent: the largest term of a dot product tells how big it can be.
    gain = largest * abs(case.facts.scale) * math.sqrt(case.facts.head_dim)
    longest = int(case.args[3].seq_lens.max()) if case.args[3].seq_lens.numel() else 1
    # Softmax weights may be rounded to the dtype before they meet the values.
    return tolerance(case.facts.dtype, longest, roundings=2, gain=gain)


def _stored(x: torch.Tensor, facts: AttentionFacts) -> torch.Tensor:
    """Heads as a page holds them, number by number."""
    if facts.kv_dtype == "float8_e4m3fn":
        return x.float().clamp(-448, 448).to(torch.float8_e4m3fn)
    if facts.kv_dtype != "int8":
        return x.to(dtype_of(facts.kv_dtype))
    rows = x.reshape(-1, x.shape[-1]).float().numpy()
    tops = np.abs(rows).max(-1, initial=0.0)
    codes = [np.rint(row * (np.float32(127) / top if top > 0 else np.float32(0))).astype(np.int8) for row, top in zip(rows, tops)]
    bytes_ = [np.concatenate([code, (top / np.float32(127)).astype(np.float32)[None].view(np.int8)]) for code, top in zip(codes, tops)]
    width = stored_dim(x.shape[-1], "int8")
    return torch.from_numpy(np.array(bytes_, np.int8).reshape(*x.shape[:-1], width))


def _numbers(stored: torch.Tensor, facts: AttentionFacts) -> torch.Tensor:
    """The other way, in float64."""
    if facts.kv_dtype == "float8_e4m3fn":
        return torch.from_numpy(numbers_of(stored))
    if facts.kv_dtype != "int8":
        return stored.double()
    raw = np.ascontiguousarray(stored.numpy())
    return torch.from_numpy(raw[..., :-4].astype(np.float64) * np.ascontiguousarray(raw[..., -4:]).view(np.float32).astype(np.float64))


def _cases(gen: torch.Generator, dtype: str) -> Iterator[Case]:
    mixed = [(1, 40), (7, 7), (1, 1), (5, 33), (1, 16), (1, 17), (3, 15)]
    base = facts_of(dtype)
    yield attention_case(gen, base, "empty", [])
    yield attention_case(gen, base, "only padding", [], padding=3, rows=2)
    yield attention_case(gen, base, "one token", [(1, 1)])
    for length in (15, 16, 17, 63, 65, 257):
        yield attention_case(gen, base, f"decode at {length}", [(1, length)])
        yield attention_case(gen, base, f"prefill of {length}", [(length, length)])
    for layout in ("plain", "pool", "heads"):
        yield attention_case(gen, base, f"mixed, {layout}", mixed, layout=layout)
    yield attention_case(gen, base, "padded", mixed, padding=5, slack=200, rows=2)
    sorted_ = sorted(mixed, key=lambda segment: segment[0] == 1)
    for extra in ({}, {"window": 10}, {"sinks": True}):
        facts = facts_of(dtype, **extra)  # type: ignore[arg-type]
        yield attention_case(gen, facts, f"lengths known, {extra}", sorted_, known=True, padding=2, rows=1)
    yield attention_case(gen, base, "lengths known, prompts only", [(7, 7), (5, 33), (130, 140)], known=True)
    yield attention_case(gen, facts_of(dtype, (4, 2), 128, 64), "pages of 64", [(150, 200), (3, 130), (1, 128), (1, 129)], known=True)
    yield from _prompts(gen, dtype)
    yield _replayed(attention_case(gen, base, "replayed", sorted_, known=True, padding=3, rows=2))
    yield from (_replayed(_shared_case(gen, dtype, longest)) for longest in (1100, 600))
    yield attention_case(gen, base, "many decodes", [(1, 3 * n + 1) for n in range(20)])
    # Splits of many keys, of few and of none; so many that nobody merges them in passing; heads that are no power of two.
    several = [(1, 900), (1, 1), (1, 64), (1, 65), (1, 400)]
    for extra in ({}, {"sinks": True, "window": 300}, {"num_heads": 6}):
        yield attention_case(gen, facts_of(dtype, **extra), f"decodes of all lengths, {extra}", several)  # type: ignore[arg-type]
    yield attention_case(gen, base, "a long decode", [(1, 2200)])
    yield attention_case(gen, base, "large logits", mixed, scale=6.0)
    case = attention_case(gen, base, "strided q", mixed)
    yield replace(case, args=(strided(case.args[0]), *case.args[1:]))
    yield from _variants(gen, dtype, mixed)


def _replayed(case: Case) -> Case:
    return replace(case, args=(*case.args[:3], replace(case.args[3], replayed=True), *case.args[4:]))


def _prompts(gen: torch.Generator, dtype: str) -> Iterator[Case]:
    """Prompts with decodes behind them, whole ones and ends of others, about the tiles of kernels that take them apart."""
    segments = [(130, 130), (64, 200), (2, 129), (257, 257), (1, 1), (1, 70)]
    for heads, page in (((8, 2), 64), ((2, 2), 16)):
        facts = facts_of(dtype, heads, 128, page)
        case = attention_case(gen, facts, f"prompts, pages of {page}", segments, layout="heads", known=True, padding=3)
        yield from (case, replace(_replayed(case), label=f"{case.label}, replayed"))
    few = attention_case(gen, facts, "one prompt, replayed", [(129, 140)], known=True, padding=120, rows=15)  # more room than it needs
    long = attention_case(gen, facts, "a context that is long for its step, replayed", [(3, 700)], known=True, rows=1)
    yield from map(_replayed, (few, long))


def _shared_case(gen: torch.Generator, dtype: str, longest: int) -> Case:
    """Decodes of which all but the first and the last, of `longest` keys, begin with the pages of the second."""
    facts = facts_of(dtype, (4, 2), 32, 32, sinks=True)
    case = attention_case(gen, facts, "shared beginning", [(1, 40), *((1, 513 + 7 * n) for n in range(5)), (1, longest)])
    batch = case.args[3]
    shared = torch.tensor([1, 0, 512, 512, 512, 512, 512, 0], dtype=torch.int32)
    batch.block_table[2:6, : 512 // 32] = batch.block_table[1, : 512 // 32]
    return replace(case, args=(*case.args[:3], replace(batch, shared=shared), *case.args[4:]))


def _variants(gen: torch.Generator, dtype: str, mixed: list[tuple[int, int]]) -> Iterator[Case]:
    for heads in ((1, 1), (3, 3), (8, 1), (9, 3), (6, 2)):
        yield attention_case(gen, facts_of(dtype, heads), f"heads {heads}", mixed)
    for dim in (16, 72, 80, 128, 256):
        yield attention_case(gen, facts_of(dtype, (4, 2), dim), f"head_dim {dim}", mixed)
    yield attention_case(gen, facts_of(dtype, (4, 2), 96, v_dim=64), "narrow values", mixed)
    for page in (1, 8, 32, 64):
        yield attention_case(gen, facts_of(dtype, page=page), f"page {page}", mixed)
    longer = [(1, 100), (20, 70), (1, 33), (40, 40)]
    for heads, dim in (((4, 2), 64), ((9, 3), 64), ((2, 1), 128), ((2, 2), 72), ((4, 1), 20)):
        for layout in ("plain", "heads"):
            facts = facts_of(dtype, heads, dim, kv_dtype="int8")
            yield attention_case(gen, facts, f"int8, {heads} heads of {dim}, {layout}", longer, layout=layout)
    for kind in ("int8", "float8_e4m3fn"):
        yield attention_case(gen, facts_of(dtype, kv_dtype=kind, window=24), f"{kind}, window", [(1, 600), (30, 290), (1, 257)])
    for heads, dim, page in (((4, 2), 64, 16), ((8, 2), 128, 64), ((2, 2), 72, 16)):
        facts = facts_of(dtype, heads, dim, page, "float8_e4m3fn")
        for layout in ("plain", "heads"):
            yield attention_case(gen, facts, f"float8, {heads} heads of {dim}, {layout}", longer, layout=layout)
    for heads, dim, rest in (
        ((4, 2), 64, {}),
        ((9, 3), 64, {"window": 24}),
        ((2, 1), 128, {"sinks": True}),
        ((3, 3), 72, {"softcap": 2.0}),
    ):
        for layout in ("pool", "heads"):
            facts = facts_of(dtype, heads, dim, coarse=True, **rest)  # type: ignore[arg-type]
            yield attention_case(gen, facts, f"coarse weights, {heads} heads of {dim}", [(70, 70), *longer, (130, 200)], layout=layout)
    for name, extra in _FEATURES.items():
        yield attention_case(gen, facts_of(dtype, **extra), name, longer, layout="pool")  # type: ignore[arg-type]
    yield from _latents(gen, dtype, mixed)


def _latents(gen: torch.Generator, dtype: str, mixed: list[tuple[int, int]]) -> Iterator[Case]:
    longer = [(33, 80), (5, 190), (1, 200), (1, 16)]
    for heads, dim, v_dim in ((4, 40, 32), (16, 576, 512), (70, 24, 16), (5, 36, 20), (128, 48, 32)):
        facts = facts_of(dtype, (heads, 1), dim, 16 if dim < 100 else 64, v_dim=v_dim, latent=True)
        yield attention_case(gen, facts, f"latent, {heads} heads of {dim}", mixed, padding=3, rows=1)
        yield attention_case(gen, facts, f"latent, {heads} heads of {dim}, long", longer, layout="heads", known=True, scale=0.5)
    wide = facts_of(dtype, (16, 1), 96, 64, v_dim=64, latent=True)
    yield attention_case(gen, wide, "latent, decodes", [(1, 40 * n + 1) for n in range(9)])
    yield attention_case(gen, wide, "latent, one long decode", [(1, 900)])
    yield attention_case(gen, replace(wide, kv_dtype="float8_e4m3fn"), "latent, float8", [(20, 90), (1, 33), (1, 700)])
    yield _replayed(attention_case(gen, wide, "latent, replayed", [(9, 90), (1, 33), (1, 700)], known=True, padding=3, rows=2))


_FEATURES: dict[str, dict[str, object]] = {
    "window": {"window": 24},
    "window of one": {"window": 1},
    "chunk": {"chunk": 32},
    "soft cap": {"softcap": 2.0},
    "sinks": {"sinks": True},
    "alibi": {"alibi": True},
    "bidirectional": {"causal": False},
    "window, sinks, soft cap": {"window": 10, "sinks": True, "softcap": 3.0},
    "scale": {"scale": 0.5},
    "bias": {"bias": True},
    "bias, window, sinks": {"bias": True, "window": 24, "sinks": True},
}


def by_request(case: Case, by_token: tuple[int, ...] = (0,)) -> Iterator[Part]:
    """Each request in a batch of its own; the batch is the fourth argument, `by_token` are those before it with a row a token."""
    batch = case.args[3]
    starts = batch.query_start.tolist()
    for row in range(len(starts) - 1):
        piece = slice(starts[row], starts[row + 1])
        if piece.start == piece.stop:
            continue
        alone = PagedBatch(
            torch.tensor([0, piece.stop - piece.start], dtype=torch.int32), batch.seq_lens[row : row + 1],
            batch.block_table[row : row + 1], batch.slots[piece], piece.stop - piece.start, int(batch.seq_lens[row]),
        )  # fmt: skip
        args = (*(arg[piece] if i in by_token else arg for i, arg in enumerate(case.args[:3])), alone, *case.args[4:])
        yield Part(replace(case, label=f"{case.label}, request {row} alone", args=args), piece)


PAGED_ATTENTION = Op("paged_attention", PagedAttentionReference, _oracle, _tolerance, _cases, by_request)


def _write_oracle(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    k, v, k_pages, v_pages, slots = case.args
    k_out, v_out = k_pages.clone().double(), v_pages.clone().double()
    for token, slot in enumerate(slots.tolist()):
        page, offset = divmod(slot, case.facts.page_size)
        k_out[page, offset] = _stored(k[token], case.facts).double()
        v_out[page, offset] = _stored(v[token], case.facts).double()
    return k_out, v_out


def _write_cases(gen: torch.Generator, dtype: str) -> Iterator[Case]:
    for kinds in ((dtype, "bfloat16", "int8"), ("float8_e4m3fn",)):
        for layout in ("plain", "pool", "heads"):
            yield from _write_cases_of(gen, dtype, kinds, layout)


def _write_cases_of(gen: torch.Generator, dtype: str, kinds: tuple[str, ...], layout: str) -> Iterator[Case]:
    odd, keys = facts_of(dtype, (4, 3), 72, 8, v_dim=40), facts_of(dtype, (4, 1), 72, 16, v_dim=0)
    for facts in (
        replace(facts, kv_dtype=kind)
        for kind in kinds
        for facts in (facts_of(dtype), odd, keys)[: 1 if kind == "bfloat16" != dtype else 2 if kind == "int8" else 3]
    ):
        for tokens in (0, 1, 17):
            k_pages, v_pages = _Layout(layout).pages(6, facts)
            scale = 30.0 if facts.kv_dtype == "int8" else 1.0  # bytes, of any content
            k_pages.copy_(draw(gen, *k_pages.shape, scale=scale)), v_pages.copy_(draw(gen, *v_pages.shape, scale=scale))
            size = 200.0 if facts.kv_dtype == "float8_e4m3fn" else 1.0  # some are more than it holds
            k = strided(draw(gen, tokens, facts.num_kv_heads, facts.head_dim, dtype=dtype, scale=size))
            v = draw(gen, tokens, facts.num_kv_heads, facts.v_dim, dtype=dtype)
            slots = torch.randperm(5 * facts.page_size, generator=gen)[:tokens] + facts.page_size
            yield Case(f"{tokens} tokens, {layout}", facts, (k, v, k_pages, v_pages, slots), mutates=(2, 3))


WRITE_KV = Op("write_kv", WriteKvReference, _write_oracle, lambda case: 0.0, _write_cases, by_rows(), claims=BY_ROW)
