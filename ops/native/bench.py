"""What the C++ kernels reach on this machine, beside torch's in turns: `python -m pagoda.ops.native.bench`.

Memory rates count weights or pages read once; the ratio of two columns of one run holds where absolute numbers drift.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from pagoda.ops.gguf.i_blocks import grid_of
from pagoda.ops.native.library import BLOCK_KINDS, AttentionArgs, BatchArgs, GemmArgs, Native, PagesArgs, QuantArgs, load

SHAPES = ((576, 960), (576, 3072), (1536, 576), (2048, 8192), (576, 49152))
"""(inner, outer) of SmolLM2-135M's layers and head, and of a 1B model's feed-forward."""

_SPREAD = 400_000_000
"""Bytes of copies that are gone through in turn, so that weights come from memory and not from a cache."""


def turns(candidates: dict[str, Callable[[int], object]], rounds: int, calls: int) -> dict[str, float]:
    """Median seconds a call of each candidate, run in turns; a candidate is given the number of the call."""
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(rounds):
        for name, run in candidates.items():
            start = time.perf_counter()
            for call in range(calls):
                run(call)
            times[name].append((time.perf_counter() - start) / calls)
    return {name: statistics.median(values) for name, values in times.items()}


def gemm(native: Native, inner: int, outer: int, rows: int, dtype: torch.dtype = torch.bfloat16) -> str:
    """One line: ours and `F.linear`, in GB/s of weights and GFLOP/s."""
    size = inner * outer * dtype.itemsize
    copies = max(1, min(64, _SPREAD // size)) if rows < 64 else 1
    plain = [torch.randn(outer, inner).to(dtype) for _ in range(copies)]
    packed = [torch.empty(-(-outer // 32) * 32 * inner, dtype=dtype) for _ in plain]
    args = [GemmArgs(inner, outer, int(dtype == torch.bfloat16), 0, target.data_ptr(), None) for target in packed]
    for arg, weight in zip(args, plain):
        native.pack(ctypes.addressof(arg), weight.data_ptr(), inner, arg.weight)
    x, out = torch.randn(rows, inner).to(dtype), torch.empty(rows, outer, dtype=dtype)
    handles, threads = [ctypes.addressof(arg) for arg in args], torch.get_num_threads()
    sides: dict[str, Callable[[int], object]] = {
        "ours": lambda call: native.gemm(handles[call % copies], x.data_ptr(), inner, rows, out.data_ptr(), outer, threads),
        "torch": lambda call: F.linear(x, plain[call % copies]),
    }
    times = turns(sides, rounds=7, calls=max(1, min(2 * copies, int(2e9 / (size * (1 + rows / 8))))))
    cells = [f"{name} {size / t / 1e9:6.1f} GB/s {2 * inner * outer * rows / t / 1e9:7.1f} GFLOP/s" for name, t in times.items()]
    return f"gemm {rows:5d} × {inner} × {outer}: {'   '.join(cells)}   {times['torch'] / times['ours']:.2f}×"


def blocks(native: Native, inner: int, outer: int, rows: int, kind: str = "Q4_1", any_order: bool = True) -> str:
    """One line: a product with weights in blocks, in GB/s of packed weights and GFLOP/s."""
    code, table = BLOCK_KINDS[kind], grid_of(kind)
    grid = None if table is None else table.data_ptr()
    args = QuantArgs(inner, outer, code, 1, None, None)
    size = native.quant_bytes(ctypes.addressof(args))
    copies = max(1, min(64, _SPREAD // size)) if rows < 64 else 1
    packed = [torch.randint(0, 100, (size,), dtype=torch.uint8) for _ in range(copies)]
    all_args = [QuantArgs(inner, outer, code, 1, weight.data_ptr(), None, grid, any_order) for weight in packed]
    handles, threads = [ctypes.addressof(arg) for arg in all_args], torch.get_num_threads()
    x, out = torch.randn(rows, inner).bfloat16(), torch.empty(rows, outer, dtype=torch.bfloat16)
    run: Callable[[int], object] = lambda call: native.quant_gemm(  # noqa: E731
        handles[call % copies], x.data_ptr(), inner, rows, out.data_ptr(), outer, threads
    )
    seconds = turns({"ours": run}, rounds=7, calls=max(1, min(2 * copies, int(2e9 / (size * (1 + rows / 8))))))["ours"]
    return f"{kind} {rows:5d} × {inner} × {outer}: {size / seconds / 1e9:6.1f} GB/s {2 * inner * outer * rows / seconds / 1e9:7.1f} GFLOP/s"


def attention(
    native: Native, segments: list[tuple[int, int]], heads: tuple[int, int] = (9, 3), dim: int = 64, page: int = 16, any_order: bool = True
) -> str:
    """One line: bfloat16 attention for `(query tokens, keys)` segments, in GB/s of pages and GFLOP/s of unmasked products."""
    pages = sum(-(-keys // page) for _, keys in segments)
    pool = torch.randn(pages + 1, 2, page, heads[1], dim).bfloat16()
    tokens, width = sum(q for q, _ in segments), max(-(-keys // page) for _, keys in segments)
    table, used = torch.zeros(len(segments), width, dtype=torch.int32), torch.randperm(pages).int() + 1
    for row, (_, keys) in enumerate(segments):
        count = -(-keys // page)
        table[row, :count], used = used[:count], used[count:]
    starts = torch.tensor([0, *(q for q, _ in segments)]).cumsum(0).int()
    lengths = torch.tensor([keys for _, keys in segments]).int()
    q, out = torch.randn(tokens, heads[0], dim).bfloat16(), torch.empty(tokens, heads[0], dim, dtype=torch.bfloat16)
    facts = AttentionArgs(1, 1, *heads, dim, dim, page, 1, any_order, 0, 0, dim**-0.5, 0.0)
    batch = BatchArgs(starts.data_ptr(), lengths.data_ptr(), table.data_ptr(), width, len(segments))
    k, v = pool[:, 0], pool[:, 1]
    where = PagesArgs(k.data_ptr(), v.data_ptr(), *k.stride()[:3], *v.stride()[:3])
    fixed = [ctypes.addressof(part) for part in (facts, batch, where)]
    threads = torch.get_num_threads()
    run = lambda call: native.attention(*fixed, q.data_ptr(), heads[0] * dim, dim, tokens, out.data_ptr(), None, None, threads)  # noqa: E731
    flops = sum(4 * heads[0] * dim * (n * keys - n * (n - 1) / 2) for n, keys in segments)
    read = sum(keys for _, keys in segments) * heads[1] * dim * 4
    seconds = turns({"ours": run}, rounds=7, calls=max(1, int(1e9 / flops)))["ours"]
    name = f"{len(segments)} × {segments[0][0]} of {segments[0][1]} keys"
    return f"attention {name}: {seconds * 1e6:8.1f} µs  {read / seconds / 1e9:6.1f} GB/s {flops / seconds / 1e9:7.1f} GFLOP/s"


def main() -> None:
    native = load()
    print(f"{native.isa}, {torch.get_num_threads()} threads")
    probe = torch.ones(1 << 27)
    print(f"read {probe.numel() * 4 / turns({'sum': lambda call: probe.sum()}, 5, 1)['sum'] / 1e9:.1f} GB/s", flush=True)
    for rows in (1, 4, 16, 128, 1024):
        for inner, outer in SHAPES if rows < 1024 else SHAPES[:4]:
            print(gemm(native, inner, outer, rows), flush=True)
    for rows in (1, 16, 1024):
        for kind in BLOCK_KINDS:
            print(blocks(native, 2048, 8192, rows, kind), flush=True)
    for segments in ([(1, 128)], [(1, 2048)], [(1, 256)] * 16, [(1, 1024)] * 32, [(128, 128)], [(1024, 1024)]):
        print(attention(native, segments), flush=True)


if __name__ == "__main__":
    main()
