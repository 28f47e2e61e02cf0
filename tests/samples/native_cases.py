"""Calls of every function of the C ABI with their float64 truth, as a file for tests/native/driver.cpp: `python native_cases.py FILE`.

Shapes, oracles and tolerances are those of `ops/cases`; here each use becomes buffers of exact size, calls, and what must be in the
buffers afterwards. `FAMILIES` says which functions a family of cases holds to its truth.
"""

from __future__ import annotations

import ctypes
import re
import struct
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from pagoda.backends.cpu.kernels_more import grid_of
from pagoda.backends.cpu.kernels_native import ACTIVATION_CODES
from pagoda.ops.cases.activation import ACTIVATION, GATED_ACTIVATION
from pagoda.ops.cases.attention import PAGED_ATTENTION, WRITE_KV, attention_case, facts_of
from pagoda.ops.cases.common import draw, tolerance
from pagoda.ops.cases.linear import GEMM, _gemm_case
from pagoda.ops.cases.linear_gguf import GEMM_GGUF, draw_blocks, true_numbers
from pagoda.ops.cases.linear_gguf import _gemm_case as _gguf_case
from pagoda.ops.cases.lora import LORA_DELTA
from pagoda.ops.cases.norm import ADD_RMS_NORM, GATED_NORM, RMS_NORM
from pagoda.ops.cases.rope import ROPE
from pagoda.ops.cases.sampling import MASKED_SAMPLE, SAMPLE, TOKEN_BITMASK, draw_masks
from pagoda.ops.gguf.types import GgmlType
from pagoda.ops.native.library import (
    BLOCK_KINDS,
    PAGE_TYPES,
    QUANT_KINDS,
    TYPES,
    AttentionArgs,
    BatchArgs,
    GemmArgs,
    LoraArgs,
    PagesArgs,
    QuantArgs,
)
from pagoda.ops.op import DTYPE_EPS, Case

API = Path(__file__).resolve().parents[2] / "ops/native/api.h"
ROLES = {"input": 0, "output": 1, "mutated": 2, "packed": 3}
_CHECKED = {torch.float32: 0, torch.bfloat16: 1, torch.int64: 2, torch.bool: 3, torch.uint8: 3, torch.int8: 3}
_INPUT_EPS = 2.0**-14
"""Inputs of the block and prompt products may become integers of 15 bits, which is coarser than float32."""
_PANEL_EPS = 2.0**-12
"""Weights of the panels that prompts in blocks meet are integers of 13 bits."""


class Address(NamedTuple):
    """Of a byte in a buffer of a recording."""

    buffer: int
    offset: int = 0


THREADS, TABLE = "threads", "table"


@dataclass
class Buffer:
    """Memory of a case: what is in it before the first call, and which addresses lie in it."""

    role: str
    align: int
    content: bytes
    size: int
    links: list[tuple[int, Address]] = field(default_factory=list)


@dataclass
class Recording:
    """A case as the driver reads it."""

    name: str
    buffers: list[Buffer] = field(default_factory=list)
    calls: list[tuple[str, tuple[Any, ...], float]] = field(default_factory=list)
    checks: list[tuple[int, int, float, np.ndarray]] = field(default_factory=list)

    def tensor(self, x: torch.Tensor | None, role: str = "input") -> Address | None:
        """The elements from the first to the last of `x`, gaps of a strided view with them."""
        if x is None:
            return None
        span = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
        content = x.as_strided((span,), (1,)).contiguous().view(torch.uint8).numpy().tobytes()
        self.buffers.append(Buffer(role, x.itemsize, content, len(content)))
        return Address(len(self.buffers) - 1)

    def room(self, size: int, align: int, role: str = "output") -> Address:
        self.buffers.append(Buffer(role, align, b"", size))
        return Address(len(self.buffers) - 1)

    def struct(self, args: ctypes.Structure, **links: Address | None) -> Address:
        at = [(getattr(type(args), name).offset, target) for name, target in links.items() if target is not None]
        self.buffers.append(Buffer("input", 8, bytes(args), ctypes.sizeof(args), at))
        return Address(len(self.buffers) - 1)

    def call(self, function: str, *arguments: Any, returns: float = float("nan")) -> None:
        self.calls.append((function, arguments, returns))

    def check(self, where: Address, want: torch.Tensor, dtype: torch.dtype, allowed: float) -> None:
        """`want`: float64 for every element of the buffer; NaN where nothing may be written."""
        size = self.buffers[where.buffer].size
        assert where.offset == 0 and want.numel() * torch.empty(0, dtype=dtype).itemsize == size, (self.name, want.shape, size)
        self.checks.append((where.buffer, _CHECKED[dtype], allowed, want.double().flatten().numpy()))

    def output(self, want: torch.Tensor, dtype: torch.dtype, allowed: float, stride: int | None = None) -> Address:
        """A new buffer for rows `stride` elements apart, which must hold `want` afterwards and nothing between the rows."""
        rows, width = (want.shape[0], want[0].numel()) if want.shape[0] else (0, 0)
        step = stride or width
        whole = torch.full((max(0, (rows - 1) * step + width),), float("nan"), dtype=torch.float64)
        whole.as_strided((rows, width), (step, 1)).copy_(want.reshape(rows, width))
        where = self.room(whole.numel() * torch.empty(0, dtype=dtype).itemsize, torch.empty(0, dtype=dtype).itemsize)
        self.check(where, whole, dtype, allowed)
        return where

    def mutated(self, x: torch.Tensor, want: torch.Tensor, allowed: float) -> Address:
        """`x`, which must hold `want` afterwards; between its elements nothing changes."""
        if x.dtype is torch.int8:  # the driver compares bytes
            want = torch.where(want < 0, want + 256, want)
        where = self.tensor(x, "mutated")
        assert where is not None
        whole = torch.full((self.buffers[where.buffer].size // x.itemsize,), float("nan"), dtype=torch.float64)
        whole.as_strided(x.shape, x.stride()).copy_(want)
        self.check(where, whole, x.dtype, allowed)
        return where


def members() -> list[str]:
    """Functions of the C ABI's table, as its header declares them."""
    body = API.read_text().split("struct PgTable {")[1].split("\n};")[0]
    return re.findall(r"\(\*(\w+)\)\(", body)


def _gemm(case: Case, dtype: str, any_order: int) -> Iterator[Recording]:
    facts, x = case.facts, case.args[0]
    if dtype == "bfloat16" and facts.in_features % 2:
        return
    r = Recording(f"gemm {dtype} {case.label}{', any order' * any_order}")
    padded = -(-facts.out_features // 32) * 32
    packed = r.room(padded * facts.in_features * x.itemsize, 64, "packed")
    args = GemmArgs(inner=facts.in_features, outer=facts.out_features, type=TYPES[dtype], any_order=any_order)
    handle = r.struct(args, weight=packed, bias=_padded(r, case.weights.get("bias"), padded))
    r.call("pack", handle, r.tensor(case.weights["weight"]), facts.in_features, packed)
    allowed = GEMM.tolerance(case) * max(1.0, any_order * _INPUT_EPS / DTYPE_EPS[dtype])
    for stride in (facts.out_features, facts.out_features + 5):
        out = r.output(GEMM.oracle(case), x.dtype, allowed, stride)
        r.call("gemm", handle, r.tensor(x), x.stride(0), x.shape[0], out, stride, THREADS)
    yield r


def _padded(r: Recording, bias: torch.Tensor | None, size: int) -> Address | None:
    if bias is None:
        return None
    whole = torch.zeros(size)
    whole[: bias.numel()] = bias
    return r.tensor(whole)


def _gemms(gen: torch.Generator, dtype: str) -> Iterator[Recording]:
    cases = [case for case in GEMM.generate(gen, dtype) if case.facts.in_features * case.facts.out_features < 10**6]
    more = (
        (4, 1026, 31),
        (5, 2, 64),
        (6, 66, 97),
        (7, 130, 160),
        (12, 1024, 40),
        (13, 1090, 34),
        (32, 96, 65),
        (241, 70, 33),
        (64, 512, 32),
    )
    cases += [_gemm_case(gen, dtype, f"{rows}×{k}×{n}", rows, (k, n), rows % 2 == 1) for rows, k, n in more]
    for case in cases:
        yield from _gemm(case, dtype, 0)
        if dtype == "bfloat16":
            yield from _gemm(case, dtype, 1)


def _quant(case: Case, dtype: str, any_order: int = 0) -> Recording:
    facts, x = case.facts, case.args[0]
    r = Recording(f"quant {dtype} {case.label}{', bias' * facts.bias}{', any order' * any_order}")
    padded, size = -(-facts.out_features // 32) * 32, packed_bytes(facts.kind, facts.in_features, facts.out_features)
    packed = r.room(size, 64, "packed")
    args = QuantArgs(
        inner=facts.in_features, outer=facts.out_features, kind=BLOCK_KINDS[facts.kind], type=TYPES[dtype], any_order=any_order
    )
    handle = r.struct(args, weight=packed, bias=_padded(r, case.weights.get("bias"), padded), grid=r.tensor(grid_of(facts.kind)))
    blocks = case.weights["weight"]
    r.call("quant_bytes", handle, returns=size)
    r.call("quant_pack", handle, r.tensor(blocks), blocks.shape[1], packed)
    coarse = _PANEL_EPS if any_order else _INPUT_EPS
    allowed = GEMM_GGUF.tolerance(case) * max(1.0, coarse / DTYPE_EPS[dtype])
    if x.shape[0]:
        stride = facts.out_features + (3 if facts.bias else 0)
        out = r.output(GEMM_GGUF.oracle(case), x.dtype, allowed, stride)
        r.call("quant_gemm", handle, r.tensor(x), x.stride(0), x.shape[0], out, stride, THREADS)
    return r


def packed_bytes(kind: str, inner: int, outer: int) -> int:
    """What the kernels' records promise for a weight without bias."""
    from pagoda.backends.cpu.kernels import _block_bytes, _Product

    return _block_bytes(_Product("float32", kind, inner, outer, False))


def _quants(gen: torch.Generator, dtype: str) -> Iterator[Recording]:
    for case in GEMM_GGUF.generate(gen, dtype):
        if case.facts.kind in BLOCK_KINDS:
            yield _quant(case, dtype)
            if case.args[0].shape[0] >= 64:
                yield _quant(case, dtype, any_order=1)
    for kind, (rows, blocks, outer) in zip(sorted(BLOCK_KINDS) * 2, ((2, 3, 70), (4, 1, 31), (5, 2, 32), (6, 5, 65), (13, 1, 97)) * 8):
        yield _quant(_gguf_case(gen, dtype, kind, rows, blocks * GgmlType[kind].block, outer, bias=outer == 70), dtype)


_IDS = ((0,), (5, 5, 39, 31, 32, 0), (-1, 7, 40, 1 << 40))
"""Rows of a table of 40 that are asked for; what is not there is zero."""


def _looked_up(table: torch.Tensor, ids: tuple[int, ...]) -> torch.Tensor:
    nothing = torch.zeros(table.shape[1], dtype=torch.float64)
    return torch.stack([table[i].double() if 0 <= i < len(table) else nothing for i in ids])


def _gathers(gen: torch.Generator, dtype: str) -> Iterator[Recording]:
    for width, ids in ((2, _IDS[0]), (66, _IDS[1]), (96, _IDS[2])):
        table = draw(gen, 40, width, dtype=dtype)
        r = Recording(f"gather {dtype} {len(ids)}×{width}")
        packed = r.room(64 * width * table.itemsize, 64, "packed")
        handle = r.struct(GemmArgs(inner=width, outer=40, type=TYPES[dtype]), weight=packed)
        r.call("pack", handle, r.tensor(table), width, packed)
        for stride in (width, width + 3):
            out = r.output(_looked_up(table, ids), table.dtype, 0.0, stride)
            r.call("gather", handle, r.tensor(torch.tensor(ids)), len(ids), out, stride, THREADS)
        yield r


def _quant_gathers(gen: torch.Generator, dtype: str) -> Iterator[Recording]:
    for kind in QUANT_KINDS:
        for ids in _IDS:
            blocks, width = draw_blocks(gen, kind, 40, 96), 96
            r = Recording(f"quant_gather {dtype} {kind} {len(ids)}")
            packed = r.room(packed_bytes(kind, width, 40), 64, "packed")
            handle = r.struct(QuantArgs(inner=width, outer=40, kind=BLOCK_KINDS[kind], type=TYPES[dtype]), weight=packed)
            r.call("quant_pack", handle, r.tensor(blocks), blocks.shape[1], packed)
            want = _looked_up(torch.from_numpy(true_numbers(blocks, kind)), ids)
            out = r.output(want, getattr(torch, dtype), tolerance(dtype), width + 1)
            r.call("quant_gather", handle, r.tensor(torch.tensor(ids)), len(ids), out, width + 1, THREADS)
            yield r


def _attention_args(facts: Any, any_order: bool = False) -> AttentionArgs:
    return AttentionArgs(
        TYPES[facts.dtype], PAGE_TYPES[facts.kv_dtype], facts.num_heads, facts.num_kv_heads, facts.head_dim, facts.v_dim,
        facts.page_size, int(facts.causal), any_order, facts.window or 0, facts.chunk or 0, facts.scale, facts.softcap or 0.0,
    )  # fmt: skip


def _pages(r: Recording, k: torch.Tensor, v: torch.Tensor, k_at: Address | None, v_at: Address | None) -> Address:
    return r.struct(PagesArgs(None, None, *k.stride()[:3], *v.stride()[:3]), k=k_at, v=v_at)


def _attend(case: Case, dtype: str, any_order: bool = False) -> Recording:
    q, k, v, batch, _, sinks, slopes, *_ = case.args
    facts = case.facts
    kind = f"{facts.num_heads}/{facts.num_kv_heads}×{facts.head_dim}"
    r = Recording(f"attention {dtype} over {facts.kv_dtype} {case.label} {kind}{' any order' * any_order}")
    table = batch.block_table
    args = BatchArgs(None, None, None, table.stride(0), table.shape[0])
    step = r.struct(args, query_start=r.tensor(batch.query_start), seq_lens=r.tensor(batch.seq_lens), table=r.tensor(table))
    pages = _pages(r, k, v, r.tensor(k), r.tensor(v))
    want = PAGED_ATTENTION.oracle(case).nan_to_num(0.0)  # tokens of no request: zeros
    wide = [None if x is None else r.tensor(x.float().contiguous()) for x in (sinks, slopes)]
    allowed = PAGED_ATTENTION.tolerance(case) * (max(1.0, 2.0**-12 / DTYPE_EPS[dtype]) if any_order else 1.0)
    out = r.output(want, q.dtype, allowed)
    r.call(
        "attention", r.struct(_attention_args(facts, any_order)), step, pages, r.tensor(q), *q.stride()[:2], q.shape[0], out, *wide, THREADS
    )
    return r


def _attentions(gen: torch.Generator, dtype: str) -> Iterator[Recording]:
    cases = [case for case in PAGED_ATTENTION.generate(gen, dtype) if _native_batch(case)]
    for other in ("bfloat16", "float32"):
        for extra in ({}, {"window": 24}, {"sinks": True}):
            facts = facts_of(dtype, (6, 2), 64, kv_dtype=other, **extra)
            cases.append(attention_case(gen, facts, f"over {other}, {extra}", [(1, 300), (1, 31), (5, 33), (1, 257)], layout="pool"))
    for heads, dim in (((7, 1), 24), ((5, 5), 40), ((8, 2), 66)):
        cases.append(attention_case(gen, facts_of(dtype, heads, dim, 16), "odd", [(1, 513), (1, 30), (1, 7)], layout="heads"))
    yield from (_attend(case, dtype) for case in cases)
    for heads, dim in (((7, 1), 24), ((5, 5), 40), ((8, 2), 66), ((6, 2), 64)):
        prompts = attention_case(gen, facts_of(dtype, heads, dim, 16), "prompts", [(70, 300), (33, 33), (1, 7)], layout="heads")
        yield _attend(prompts, dtype, any_order=True)
    for heads, dim in (((3, 1), 64), ((2, 2), 80), ((4, 2), 128), ((5, 1), 48), ((12, 2), 32), ((7, 1), 112), ((8, 1), 256)):
        for extra in (
            {},
            {"kv_dtype": "float32", "window": 40},
            {"kv_dtype": "bfloat16", "sinks": True},
            {"kv_dtype": "int8", "softcap": 30.0},
        ):
            facts = facts_of(dtype, heads, dim, 16, **extra)
            decodes = [(1, 513), (1, 30), (1, 7), (1, 256), (1, 1)] + [(2, 19)] * (heads[0] // heads[1] < 5)
            yield _attend(attention_case(gen, facts, f"decodes, {extra}", decodes, layout="heads"), dtype, any_order=True)


def _native_batch(case: Case) -> bool:
    """Not those of kernels that are told more than lengths and tables (of the page-walking kernel they ask nothing new), nor pages that the
    library declines."""
    return case.args[3].shared is None and not case.args[3].replayed and not case.facts.bias and case.facts.kv_dtype in PAGE_TYPES


def _writes(gen: torch.Generator, dtype: str) -> Iterator[Recording]:
    for case in (case for case in WRITE_KV.generate(gen, dtype) if case.facts.kv_dtype in PAGE_TYPES):
        k, v, k_pages, v_pages, slots = case.args
        k_want, v_want = WRITE_KV.oracle(case)
        r = Recording(f"write_kv {dtype} over {case.facts.kv_dtype} {case.label} {case.facts.head_dim}")
        pages = _pages(r, k_pages, v_pages, r.mutated(k_pages, k_want, 0.0), r.mutated(v_pages, v_want, 0.0))
        sources = (r.tensor(k), *k.stride()[:2], r.tensor(v), *v.stride()[:2], r.tensor(slots))
        r.call("write_kv", r.struct(_attention_args(case.facts)), pages, *sources, k.shape[0], THREADS)
        yield r


def _ropes(gen: torch.Generator, dtype: str) -> Iterator[Recording]:
    for case in ROPE.generate(gen, dtype):
        q, k, cos, sin = case.args
        facts, r = case.facts, Recording(f"rope {dtype} {case.label} {case.facts.style} {case.facts.rotary_dim}")
        for x, want in zip((q, k), ROPE.oracle(case), strict=True):
            where = r.mutated(x, want, ROPE.tolerance(case))
            shape = (*x.stride()[:2], *x.shape[:2], facts.rotary_dim, int(facts.style == "interleaved"))
            r.call("rope", where, TYPES[dtype], *shape, r.tensor(cos), r.tensor(sin), cos.stride(0), THREADS)
        yield r


def _flat(x: torch.Tensor) -> torch.Tensor:
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def _norms(gen: torch.Generator, dtype: str) -> Iterator[Recording]:
    for op in (RMS_NORM, ADD_RMS_NORM):
        for case in op.generate(gen, dtype):
            facts, x = case.facts, _flat(case.args[0])
            r = Recording(f"rms_norm {dtype} {case.label} {facts.width}{', added' if op is ADD_RMS_NORM else ''}")
            weight = r.tensor(case.weights.get("weight"))
            want = op.oracle(case)
            total: Address | None = None
            if op is ADD_RMS_NORM:
                want, sums = want
                total = r.mutated(case.args[1].contiguous().view(-1, facts.width), sums.view(-1, facts.width), op.tolerance(case))
            out = r.output(want.reshape(-1, facts.width), x.dtype, op.tolerance(case))
            static = (weight, facts.offset, facts.eps, TYPES[dtype])
            r.call("rms_norm", r.tensor(x), x.stride(0), total, facts.width, *static, *x.shape, out, total, THREADS)
            yield r


def _gated_norms(gen: torch.Generator, dtype: str) -> Iterator[Recording]:
    for case in GATED_NORM.generate(gen, dtype):
        facts, (x, gate) = case.facts, case.args
        kind = f"{facts.gate}{', first' * facts.gate_first}, {facts.weight}"
        r = Recording(f"gated_norm {dtype} {case.label} {facts.groups}×{facts.width} {kind}")
        static = (r.tensor(case.weights["weight"]), facts.width if facts.weight == "own" else 0, facts.eps, TYPES[dtype])
        how = (int(facts.gate == "silu"), int(facts.gate_first), x.shape[0], facts.groups, facts.width)
        out = r.output(GATED_NORM.oracle(case), x.dtype, GATED_NORM.tolerance(case))
        r.call("gated_norm", r.tensor(x), x.stride(0), r.tensor(gate), gate.stride(0), *static, *how, out, THREADS)
        yield r


def _activations(gen: torch.Generator, dtype: str) -> Iterator[Recording]:
    for op, gated in ((ACTIVATION, 0), (GATED_ACTIVATION, 1)):
        for case in op.generate(gen, dtype):
            facts, x = case.facts, case.args[0]
            limit = (facts.limit or 0.0) if gated else 0.0
            static = (TYPES[dtype], ACTIVATION_CODES[facts.kind], gated, float(limit), 0.0, 0.0)
            label = f"activation {dtype} {case.label}{', gated' * gated}, limit {limit}"
            yield _activation(label, static, x, op.oracle(case), op.tolerance(case))
    for rows, width in ((1, 1), (3, 37), (17, 64)):
        x, alpha, shift = draw(gen, rows, 2 * width, dtype=dtype, scale=4), 1.702, 1.0
        gate, up = (part.double() for part in x.split(width, dim=1))
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
        want = gate * torch.sigmoid(alpha * gate) * (up + shift)
        static = (TYPES[dtype], ACTIVATION_CODES["alpha"], 1, 7.0, alpha, shift)
        yield _activation(f"activation {dtype} alpha {rows}×{width}", static, x, want, tolerance(dtype, roundings=3))


def _activation(label: str, static: tuple[Any, ...], x: torch.Tensor, want: torch.Tensor, allowed: float) -> Recording:
    r, width = Recording(label), x.shape[1] >> static[2]
    out = r.output(want, x.dtype, allowed)
    r.call("activation", r.tensor(x), x.stride(0), *static, x.shape[0], width, out, THREADS)
    return r


def _samples(gen: torch.Generator, dtype: str) -> Iterator[Recording]:
    drawn = [(case, SAMPLE.oracle(case)) for case in SAMPLE.generate(gen, dtype)]
    drawn += [(case, MASKED_SAMPLE.oracle(case)) for case in MASKED_SAMPLE.generate(gen, dtype)]
    for case, (want, bad) in drawn:
        logits, *masks, rows = case.args
        r = Recording(f"sample {dtype} {case.label}{', masked' * len(masks)}")
        allowed = r.tensor(masks[0]) if masks else None
        common = (r.tensor(logits), logits.stride(0), TYPES[dtype], *logits.shape, allowed)
        results = (r.output(want[:, None], torch.int64, 0.0), r.output(bad[:, None].double(), torch.bool, 0.0), THREADS)
        columns = [r.tensor(c) for c in (rows.temperature, rows.top_k, rows.top_p, rows.min_p, rows.seed, rows.position)]
        if rows.all_greedy:
            r.call("argmax", *common, *results)
        r.call("sample", TABLE, *common, *columns, *results)
        yield r


def _argmaxes(gen: torch.Generator, dtype: str) -> Iterator[Recording]:
    shapes = ((1, 1), (3, 15), (2, 31), (5, 100), (4, 257), (2, 1030), (3, 5000))
    for rows, width in shapes:
        yield _masked_argmax(gen, dtype, 6 * rows, width)
    for rows, width in shapes:
        x = draw(gen, rows, width + 7, dtype=dtype)[:, :width]
        spoiled = torch.zeros(rows, dtype=torch.bool)
        if width > 100:  # a row with NaN is told, and its largest number found beside it
            x[0, width // 2], spoiled[0] = float("nan"), True
            x[1, -1] = x[1].max() + 1
        want = x.double().nan_to_num(-float("inf")).argmax(1)
        r = Recording(f"argmax {dtype} {rows}×{width}")
        results = (r.output(want[:, None], torch.int64, 0.0), r.output(spoiled[:, None].double(), torch.bool, 0.0), THREADS)
        r.call("argmax", r.tensor(x), x.stride(0), TYPES[dtype], rows, width, None, *results)
        yield r


def _masked_argmax(gen: torch.Generator, dtype: str, rows: int, width: int) -> Recording:
    """Rows with NaN, told where it is allowed; what is refused is no number or above all."""
    x, masks = draw(gen, rows, width + 7, dtype=dtype)[:, :width], draw_masks(gen, rows, width)
    allowed = torch.from_numpy(np.unpackbits(masks.numpy().view(np.uint8), axis=1, bitorder="little")[:, :width]).bool()
    x.masked_fill_(~allowed & (torch.rand(rows, width, generator=gen) < 0.5), float("inf"))
    x.masked_fill_(torch.rand(rows, width, generator=gen) < 0.01, float("nan"))
    spoiled = (x.isnan() & allowed).any(1)
    seen = torch.where(allowed, x.double().nan_to_num(-float("inf"), posinf=float("inf")), -float("inf"))
    r = Recording(f"argmax {dtype} {rows}×{width}, masked")
    results = (r.output(seen.argmax(1)[:, None], torch.int64, 0.0), r.output(spoiled[:, None].double(), torch.bool, 0.0), THREADS)
    r.call("argmax", r.tensor(x), x.stride(0), TYPES[dtype], rows, width, r.tensor(masks), *results)
    return r


def _bitmasks(gen: torch.Generator, dtype: str) -> Iterator[Recording]:
    for case in TOKEN_BITMASK.generate(gen, dtype):
        logits, mask = case.args
        r = Recording(f"bitmask {dtype} {case.label}")
        where = r.mutated(logits, TOKEN_BITMASK.oracle(case), 0.0)
        r.call("bitmask", where, logits.stride(0), TYPES[dtype], *logits.shape, r.tensor(mask), THREADS)
        yield r


def _exponentials(gen: torch.Generator, dtype: str) -> Iterator[Recording]:
    for width in (1, 3, 15, 17, 63, 257, 1023, 1024, 1025, 4099):
        x = draw(gen, width, dtype=dtype, scale=4)
        top, factor = float(x.max()), 0.75
        want = ((x.double() - top) * factor).exp()
        masks = draw_masks(gen, 1, width)
        allowed = torch.from_numpy(np.unpackbits(masks.numpy().view(np.uint8), bitorder="little")[:width]).bool()
        for mask, kept in ((None, want), (masks, torch.where(allowed, want, 0.0))):
            r = Recording(f"exp_row {dtype} {width}{'' if mask is None else ', masked'}")
            out = r.output(kept[None, :], torch.float32, 4 * 2.0**-22)
            r.call("exp_row", r.tensor(x), TYPES[dtype], width, r.tensor(mask), top, factor, out, returns=float(kept.sum()))
            yield r


def _loras(gen: torch.Generator, dtype: str) -> Iterator[Recording]:
    for case in LORA_DELTA.generate(gen, dtype):
        facts, (out, x, down, up, slots) = case.facts, case.args
        r = Recording(f"lora {dtype} {case.label} {facts.in_features}×{facts.out_features}")
        sizes = (facts.in_features, facts.out_features, facts.rank, facts.slots, len(facts.parts), TYPES[dtype])
        handle = r.struct(LoraArgs(*sizes), columns=r.tensor(torch.tensor(facts.parts)))
        where = r.mutated(out, LORA_DELTA.oracle(case), LORA_DELTA.tolerance(case))
        r.call("lora", handle, r.tensor(x), x.stride(0), r.tensor(down), r.tensor(up), r.tensor(slots), x.shape[0], where, THREADS)
        yield r


class Family(NamedTuple):
    """Cases, and the functions that they hold to their truth."""

    functions: tuple[str, ...]
    cases: Callable[[torch.Generator, str], Iterator[Recording]]


FAMILIES = {
    "gemm": Family(("pack", "gemm"), _gemms),
    "quant": Family(("quant_bytes", "quant_pack", "quant_gemm"), _quants),
    "gather": Family(("gather",), _gathers),
    "quant_gather": Family(("quant_gather",), _quant_gathers),
    "attention": Family(("attention",), _attentions),
    "write_kv": Family(("write_kv",), _writes),
    "rope": Family(("rope",), _ropes),
    "rms_norm": Family(("rms_norm",), _norms),
    "gated_norm": Family(("gated_norm",), _gated_norms),
    "activation": Family(("activation",), _activations),
    "sample": Family(("sample",), _samples),
    "argmax": Family(("argmax",), _argmaxes),
    "bitmask": Family(("bitmask",), _bitmasks),
    "lora": Family(("lora",), _loras),
    "exp_row": Family(("exp_row",), _exponentials),
}


def recordings(families: tuple[str, ...] = tuple(FAMILIES), dtypes: tuple[str, ...] = tuple(TYPES), seed: int = 0) -> Iterator[Recording]:
    """All cases of the families, the same for the same seed."""
    for name in families:
        for dtype in dtypes:
            yield from FAMILIES[name].cases(torch.Generator().manual_seed(seed), dtype)


def write(path: Path, cases: list[Recording]) -> None:
    """The file that the driver reads."""
    with path.open("wb") as file:
        file.write(struct.pack("<I", len(cases)))
        for case in cases:
            file.write(_encode(case))


def _text(words: str) -> bytes:
    return struct.pack("<I", len(words.encode())) + words.encode()


def _encode(case: Recording) -> bytes:
    parts = [_text(case.name), struct.pack("<I", len(case.buffers))]
    for b in case.buffers:
        parts += [struct.pack("<BIQ", ROLES[b.role], b.align, b.size), b.content, struct.pack("<I", len(b.links))]
        parts += [struct.pack("<IIQ", offset, target.buffer, target.offset) for offset, target in b.links]
    parts.append(struct.pack("<I", len(case.calls)))
    for function, arguments, returns in case.calls:
        parts += [_text(function), struct.pack("<I", len(arguments)), *map(_argument, arguments), struct.pack("<d", returns)]
    parts.append(struct.pack("<I", len(case.checks)))
    for buffer, kind, allowed, want in case.checks:
        parts += [struct.pack("<IBdQ", buffer, kind, allowed, want.size), want.astype("<f8").tobytes()]
    return b"".join(parts)


def _argument(value: Any) -> bytes:
    kind, number, real, buffer = "i", 0, 0.0, 0
    if isinstance(value, Address):
        kind, number, buffer = "p", value.offset, value.buffer
    elif value in (None, TABLE, THREADS):
        kind = {None: "0", TABLE: "t", THREADS: "h"}[value]
    elif isinstance(value, float):
        kind, real = "f", value
    else:
        number = int(value)
    return struct.pack("<cqdI", kind.encode(), number, real, buffer)


if __name__ == "__main__":
    write(Path(sys.argv[1]), list(recordings(tuple(sys.argv[2:]) or tuple(FAMILIES))))
