"""Uses of the kernels with the shapes of served models, on meta tensors: what `cross_compile.py --all` compiles beside the cases."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import torch
from cross_states import conv_cases, delta_cases, gated_norm_cases, selective_cases, ssd_cases, wkv_cases
from pagoda.ops.activation import ActivationFacts
from pagoda.ops.attention import AttentionFacts, HostLengths, PagedBatch
from pagoda.ops.linear import GemmFacts
from pagoda.ops.linear_fp8 import GemmFp8Facts
from pagoda.ops.lora import LoraFacts
from pagoda.ops.moe import MoeMlpFacts, RouteFacts
from pagoda.ops.moe_fp8 import MoeMlpFp8Facts
from pagoda.ops.norm import NormFacts
from pagoda.ops.norm_gemm import NormGemmFacts
from pagoda.ops.op import Case
from pagoda.ops.rope_write import RopeWriteFacts
from pagoda.ops.sampling import SamplingFacts, SamplingRows
from pagoda.ops.segment_attention import SegmentAttentionFacts, Segments
from pagoda.ops.sparse_attention import ChooseFacts, SparseAttentionFacts
from pagoda.ops.triton import gemm_routes
from pagoda.ops.triton.gated_gemm import MANY

HEADS = (128, 64, 80, 96, 192, 256)
EXPERTS = (
    MoeMlpFacts("", 128, 2048, 768, 8),
    MoeMlpFacts("", 8, 4096, 14336, 2),
    MoeMlpFacts("", 32, 2880, 2880, 4, bias=True, alpha=1.702, limit=7.0),
    MoeMlpFacts("", 16, 5120, 8192, 1, scale_input=True),
    MoeMlpFacts("", 256, 7168, 2048, 8, first=32, local=32),
)
SPECIAL: tuple[tuple[tuple[int, ...], dict[str, Any]], ...] = (
    ((128, 256), {"window": 4096}), ((256,), {"softcap": 50.0}), ((256,), {"softcap": 50.0, "window": 4096}), ((64,), {"sinks": True}),
    ((64,), {"sinks": True, "window": 128}), ((128,), {"chunk": 8192}), ((64, 128), {"alibi": True}), ((64, 128), {"causal": False}),
    ((64,), {"bias": True}),
)  # fmt: skip
"""Heads of models whose attention sees less, more, or otherwise."""
LAYERS = ((6144, 4096), (28672, 4096), (4096, 14336), (5120, 2048), (960, 576))
"""(outputs, inner numbers) that no table was measured for stand beside those that one was."""

ADAPTED = ((4096, (4096, 1024, 1024)), (14336, (4096,)))
"""(inner numbers, parts) of layers with room for adapters."""
ENCODERS: tuple[tuple[int, int, int, dict[str, Any]], ...] = (
    (20, 20, 64, {}), (16, 16, 72, {}), (16, 16, 80, {}), (16, 16, 96, {}), (16, 8, 128, {}), (12, 12, 64, {"window": 64}),
    (32, 32, 64, {"bias": True}), (4, 1, 256, {}),
)  # fmt: skip
"""(heads, KV heads, their size, what else) of encoders: Whisper's, towers', ModernBERT's, T5's, Gemma's."""


def shapes(op: str, dtype: str) -> Iterator[Case] | None:
    """Uses of primitive `op` by models; their tensors have no bytes. None: no list of them is kept."""
    return MAKERS[op](dtype) if op in MAKERS else None


def _empty(dtype: str, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")


def _attention(dtype: str) -> Iterator[Case]:
    base = AttentionFacts(dtype, dtype, 32, 8, 128, 128, 64, 0.1)
    plain = [replace(base, head_dim=dim, v_dim=dim) for dim in HEADS]
    float8 = [replace(facts, kv_dtype="float8_e4m3fn") for facts in plain if facts.head_dim in (64, 128, 256)]
    if dtype == "bfloat16":
        plain += [replace(base, head_dim=dim, v_dim=dim, page_size=16) for dim in (64, 128, 256)]
    grouped = [replace(base, num_heads=8 * group) for group in (1, 2, 6, 8, 16)]
    special = [replace(base, **more, head_dim=dim, v_dim=dim) for dims, more in SPECIAL for dim in dims]
    if dtype == "float32":  # which nobody serves in: what its tiles differ by
        float8, grouped, special = float8[1:2], [], []
    for facts in [*plain, *float8, *grouped, replace(base, head_dim=192), *special]:
        yield _step(facts, "decodes of 64", [1] * 64, 4096)
        yield _step(facts, "decodes of 8", [1] * 8, 8192)
        yield _step(facts, "prompts", [4096, 300, *[20] * 6], 8192)
        if facts in plain or facts in float8:
            yield _step(facts, "decode of 1", [1], 8192)
            yield _step(facts, "drafts", [5] * 8, 2048)
        if facts in plain:
            yield _step(facts, "prompt", [4096], 4096)
            yield _step(facts, "drafts, replayed", [5] * 4 + [1] * 4, 2048, replayed=True)
    for facts in (base, replace(base, kv_dtype="float8_e4m3fn")):
        yield _step(facts, "a beginning that decodes share", [1] * 64, 4096, shared=True)
    for heads, pages in product((16, 128), (dtype, "float8_e4m3fn")):
        facts = AttentionFacts(dtype, pages, heads, 1, 576, 512, 64, 0.1, latent=True)
        yield _step(facts, f"latents, decodes of {heads} heads", [1] * 64, 4096)
        yield _step(facts, f"latents, decode of {heads} heads", [1], 8192)
        yield _step(facts, f"latents, prompts of {heads} heads", [4096, 300], 8192)


def _step(facts: AttentionFacts, label: str, queries: list[int], longest: int, shared: bool = False, replayed: bool = False) -> Case:
    rows, tokens, page = len(queries), sum(queries), facts.page_size
    starts = np.concatenate(([0], np.cumsum(queries))).astype(np.int32)
    batch = PagedBatch(
        _empty("int32", rows + 1), _empty("int32", rows), _empty("int32", rows, longest // page), _empty("int64", tokens), max(queries),
        longest, HostLengths(starts, np.full(rows, longest, np.int32)), shared=_empty("int32", rows + 1) if shared else None,
        replayed=replayed,
    )  # fmt: skip
    pages = [_empty(facts.kv_dtype, 1000, facts.num_kv_heads, page, dim).transpose(1, 2) for dim in (facts.head_dim, facts.v_dim)]
    if facts.latent:
        pages[1] = pages[0][..., : facts.v_dim]
    q = _empty(facts.dtype, tokens, facts.num_heads, facts.head_dim)
    sinks = _empty(facts.dtype, facts.num_heads) if facts.sinks else None
    slopes = _empty("float32", facts.num_heads) if facts.alibi else None
    bias = _empty("float32", facts.num_heads, 128) if facts.bias else None
    return Case(f"{label}, heads of {facts.head_dim}, pages of {page}", facts, (q, *pages, batch, None, sinks, slopes, bias), batch=3)


def _gemm(dtype: str) -> Iterator[Case]:
    for columns, inner, rows in _measured("routes"):
        weights = {"weight": _empty(dtype, columns, inner)}
        yield Case(f"{rows}×{inner}×{columns}", GemmFacts(dtype, inner, columns), (_empty(dtype, rows, inner),), weights)


def _gemm_fp8(dtype: str) -> Iterator[Case]:
    for (columns, inner, rows), block in product(_measured("fp8"), (0, 128)):
        facts = GemmFp8Facts(dtype, inner, columns, False, block)
        weights = {"weight": _empty("float8_e4m3fn", columns, inner), "scale": _empty("float32", *facts.scale_shape)}
        yield Case(f"{rows}×{inner}×{columns}, squares of {block}", facts, (_empty(dtype, rows, inner),), weights)


def _measured(*names: str) -> list[tuple[int, int, int]]:
    """(outputs, inner numbers, rows) of the tables, and layers that they lack with a few numbers of rows."""
    table = gemm_routes._read()
    found = [(columns, inner, rows) for name in names for columns, inner, rows, _ in table.get(name, ())]
    return list(dict.fromkeys([*found, *((*layer, rows) for layer in LAYERS for rows in (1, 5, 16, 64, 300))]))


def _norm_gemm(dtype: str) -> Iterator[Case]:
    # What is compiled depends on the inner numbers and on the way: the joined ways are few.
    few = [one for one in _measured("joined", "joined_gated") if one[2] in (1, 16, 64)]
    for (columns, inner, rows), gated, fp8 in product(few, (False, True), (False, True)):
        norm = NormFacts(dtype, inner, 1e-6)
        gemm: Any = GemmFp8Facts(dtype, inner, columns) if fp8 else GemmFacts(dtype, inner, columns)
        facts = NormGemmFacts(norm, gemm, ActivationFacts(dtype, "silu") if gated else None)
        weights = {"weight": _empty("float8_e4m3fn" if fp8 else dtype, columns, inner), "norm": _empty(dtype, inner)}
        if fp8:
            weights["scale"] = _empty("float32", columns)
        yield Case(f"{rows}×{inner}×{columns}", facts, (_empty(dtype, rows, inner), _empty(dtype, rows, inner)), weights)
    for (columns, inner), rows in product(LAYERS, (MANY, 8192)):
        facts = NormGemmFacts(NormFacts(dtype, inner, 1e-6), GemmFacts(dtype, inner, columns), ActivationFacts(dtype, "silu"))
        x, weights = _empty(dtype, rows, inner), {"weight": _empty(dtype, columns, inner), "norm": _empty(dtype, inner)}
        yield Case(f"{rows}×{inner}×{columns}", facts, (x, x), weights)


def _moe(dtype: str) -> Iterator[Case]:
    for facts, tokens in product(EXPERTS, (1, 16, 512, 8192)):
        here, width, hidden = facts.local or facts.experts, facts.width, facts.hidden
        weights = {"up": _empty(dtype, here, 2 * hidden, width), "down": _empty(dtype, here, width, hidden)}
        if facts.bias:
            weights |= {"up_bias": _empty(dtype, here, 2 * hidden), "down_bias": _empty(dtype, here, width)}
        args = (_empty(dtype, tokens, width), _empty("float32", tokens, facts.top_k), _empty("int64", tokens, facts.top_k))
        yield Case(f"{tokens} tokens, {facts.experts} experts", replace(facts, dtype=dtype), args, weights)


def _moe_fp8(dtype: str) -> Iterator[Case]:
    for case, block in product(_moe(dtype), (0, 128)):
        facts = MoeMlpFp8Facts(case.facts, block)
        codes = {name: _empty("float8_e4m3fn", *facts.shape(name)) for name in ("up", "down")}
        scales = {f"{name}_scale": _empty("float32", *facts.scale_shape(name)) for name in ("up", "down")}
        yield replace(case, label=f"{case.label}, squares of {block}", facts=facts, weights={**case.weights, **codes, **scales})


def _route(dtype: str) -> Iterator[Case]:
    for experts, top_k, score in (
        (128, 8, "softmax"),
        (8, 2, "softmax"),
        (32, 4, "softmax_after"),
        (16, 1, "sigmoid"),
        (512, 10, "softmax"),
    ):
        yield Case(f"{experts} experts", RouteFacts(dtype, experts, top_k, score), (_empty(dtype, 33, experts), None))  # type: ignore[arg-type]


def _rope_write(dtype: str) -> Iterator[Case]:
    cuts = [*product(HEADS, (False, True), (1, 2), (dtype,)), *product((128,), (False, True), (1,), ("float8_e4m3fn",))]
    for (dim, norm, part, kind), tokens in product(cuts, (1, 64, 2048)):
        facts = RopeWriteFacts(dtype, kind, 32, 8, dim, dim // part, 64, norm=norm, eps=1e-6)
        pages = [_empty(kind, 1000, 8, 64, dim).transpose(1, 2) for _ in range(2)]
        angles = [_empty("float32", tokens, dim // part // 2) for _ in range(2)]
        weights = {"q_norm": _empty(dtype, dim), "k_norm": _empty(dtype, dim)} if norm else {}
        args = (_empty(dtype, tokens, 48 * dim), *angles, *pages, _empty("int64", tokens))
        yield Case(f"{tokens} tokens, heads of {dim}", facts, args, weights)


def _norm(dtype: str) -> Iterator[Case]:
    for width, rows in product((64, 128, 576, 1024, 2048, 2880, 4096, 5120, 8192, 16384), (1, 64)):
        yield Case(f"{rows}×{width}", NormFacts(dtype, width, 1e-6), (_empty(dtype, rows, width),), {"weight": _empty(dtype, width)})


def _add_norm(dtype: str) -> Iterator[Case]:
    for case in _norm(dtype):
        yield replace(case, args=case.args * 2)


def _sample(dtype: str) -> Iterator[Case]:
    for vocab, rows, greedy, filtered in product((32000, 128256, 151936, 262144), (1, 64), (False, True), (False, True)):
        floats = [_empty("float32", rows) for _ in range(3)]
        k, seed, position = _empty("int32", rows), _empty("int64", rows), _empty("int64", rows)
        settings = SamplingRows(floats[0], k, floats[1], floats[2], seed, position, all_greedy=greedy, any_filter=filtered)
        yield Case(f"{rows} rows of {vocab}", SamplingFacts(dtype, vocab), (_empty(dtype, rows, vocab), settings))


def _lora(dtype: str) -> Iterator[Case]:
    few = dtype == "float32"  # which nobody serves in
    for (inner, parts), rank, tokens in product(ADAPTED[: 1 if few else None], (16,) if few else (16, 256), (1, 64, 2048)):
        facts = LoraFacts(dtype, inner, parts, 8, rank)
        args = (_empty(dtype, tokens, facts.out_features), _empty(dtype, tokens, inner), _empty(dtype, *facts.down_shape))
        yield Case(f"{tokens} tokens, rank {rank}", facts, (*args, _empty(dtype, *facts.up_shape), _empty("int32", tokens)), mutates=(0,))


def _segments(dtype: str) -> Iterator[Case]:
    for (heads, kv_heads, dim, more), lengths in product(ENCODERS[: 2 if dtype == "float32" else None], ((1500,), (20,) * 64)):
        facts = SegmentAttentionFacts(dtype, heads, kv_heads, dim, 0.1, **more)
        tokens, segments = sum(lengths), Segments(_empty("int32", len(lengths) + 1))
        q, k, v = (_empty(dtype, tokens, count, dim) for count in (heads, kv_heads, kv_heads))
        bias = _empty("float32", heads, 2 * max(lengths) - 1) if facts.bias else None
        yield Case(f"{len(lengths)} segments, heads of {dim}", facts, (q, k, v, segments, bias))


def _latents(dtype: str, heads: int, width: int) -> Iterator[tuple[str, torch.Tensor, torch.Tensor, PagedBatch]]:
    """Decodes, one decode and prompts: queries of `heads` heads, and pages of keys that they share."""
    facts = AttentionFacts(dtype, dtype, heads, 1, width, width, 64, 0.1)
    for label, queries, longest in (("decodes of 64", [1] * 64, 16384), ("decode of 1", [1], 65536), ("prompts", [4096, 300], 8192)):
        case = _step(facts, label, queries, longest)
        yield label, case.args[0], case.args[1], case.args[3]


def _choices(dtype: str) -> Iterator[Case]:
    for label, q, pages, batch in _latents(dtype, 64, 128):
        yield Case(label, ChooseFacts(dtype, dtype, 64, 128, 64, 2048), (q, _empty(dtype, q.shape[0], 64), pages, batch))


def _sparse(dtype: str) -> Iterator[Case]:
    for heads in (16, 128):
        facts = SparseAttentionFacts(dtype, dtype, heads, 576, 512, 64, 0.1, 2048)
        for label, q, pages, batch in _latents(dtype, heads, 576):
            yield Case(f"{label}, {heads} heads", facts, (q, pages, _empty("int32", q.shape[0], 2048), batch))


MAKERS = {
    "lora_delta": _lora, "segment_attention": _segments, "choose_keys": _choices, "sparse_attention": _sparse,
    "paged_attention": _attention, "gemm": _gemm, "gemm_fp8": _gemm_fp8, "norm_gemm": _norm_gemm, "moe_mlp": _moe, "moe_mlp_fp8": _moe_fp8,
    "route": _route, "rope_write": _rope_write, "rms_norm": _norm, "add_rms_norm": _add_norm, "sample": _sample,
    "causal_conv1d": conv_cases, "ssd_scan": ssd_cases, "gated_delta_rule": delta_cases, "selective_scan": selective_cases,
    "gated_norm": gated_norm_cases, "wkv": wkv_cases,
}  # fmt: skip
