"""The kernels of `--batch-invariant`: against the oracle, to the bit whatever the company, and what their fixed order costs."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from pagoda.hal.discovery import choose
from pagoda.hal.kernel import Kernel
from pagoda.ops.attention import AttentionFacts, PagedBatch
from pagoda.ops.check import check_kernel
from pagoda.ops.linear import GemmFacts
from pagoda.ops.registry import ALL_OPS
from pagoda.ops.table import candidates
from report_shapes import SHAPES

ROWS = (1, 2, 7, 16, 33, 64, 65, 100, 128, 200, 256, 300, 1000)
Bound = Callable[..., Any]


def kernels(options: argparse.Namespace) -> dict[str, Any]:
    """Kernels of batch invariance: right, equal to the bit in any company, and their times beside those of the default ones."""
    backend = choose(options.device).backend
    device = backend.open(0)
    fixed = [kernel for kernel in candidates(backend) if kernel.name == "triton_fixed" and not kernel.needs.refuse_device(device.info)]
    config, there = SHAPES[options.shape], device.torch_device
    products = [_products(kernel, config, there) for kernel in fixed if kernel.op == "gemm"]
    attention = [_attention(kernel, config, there) for kernel in fixed if kernel.op == "paged_attention"]
    rows = []
    for kernel in fixed:
        op = ALL_OPS[kernel.op]
        for dtype in sorted(set(op.dtypes) & set(kernel.needs.dtypes) & device.info.dtypes):
            report = check_kernel(kernel, op, dtype=dtype, device=device.torch_device, info=device.info)
            print(report, flush=True)
            rows.append({"op": kernel.op, "dtype": dtype, "ran": report.ran, "worst": report.worst, "failures": report.failures})
    wrong = [one for found in (*products, *attention) for one in found["wrong"]]
    ok = not wrong and not any(row["failures"] for row in rows)
    return {"ok": ok, "kernels": rows, "products": products, "attention": attention, "of": len(fixed)}


def _products(kernel: Kernel, config: dict[str, Any], there: torch.device) -> dict[str, Any]:
    width, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"] * config["head_dim"]
    found: dict[str, Any] = {"wrong": [], "us": []}
    for columns, depth in ((heads, width), (width, heads), (2 * inner, width), (width, inner), (config["vocab_size"], width)):
        run = kernel.load(GemmFacts("bfloat16", depth, columns))
        weight = torch.randn(columns, depth, device=there, dtype=torch.bfloat16) * depth**-0.5
        x = torch.randn(max(ROWS), depth, device=there, dtype=torch.bfloat16)
        whole = run.run({"weight": weight}, x)
        for rows in ROWS:
            if not torch.equal(run.run({"weight": weight}, x[-rows:]), whole[-rows:]):
                found["wrong"].append(f"{columns} × {depth}, {rows} rows")
        for rows in (1, 16, 256, 1000):
            part = x[:rows].contiguous()
            times = [_us(partial(run.run, {"weight": weight}, part)), _us(partial(torch.nn.functional.linear, part, weight))]
            found["us"].append([columns, depth, rows, *times])
            print(f"{columns} × {depth}, {rows} rows: {times[0]:.1f} µs, torch {times[1]:.1f}", flush=True)
    print(f"products that depend on company: {found['wrong']}", flush=True)
    return found


def _attention(kernel: Kernel, config: dict[str, Any], there: torch.device) -> dict[str, Any]:
    """A prompt in one piece, in chunks of every kind, and its last token alone."""
    heads, kv, dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    found: dict[str, Any] = {"wrong": [], "us": []}
    for length in (40, 700, 1500):
        run = kernel.load(AttentionFacts("bfloat16", "bfloat16", heads, kv, dim, dim, 64, dim**-0.5))
        pages = torch.randn(2, 64, 64, kv, dim, device=there, dtype=torch.bfloat16)
        q = torch.randn(length, heads, dim, device=there, dtype=torch.bfloat16)
        table = torch.randperm(63, device=there)[: -(-length // 64)].int()[None] + 1
        whole = run.run(q, *pages, _batch(table, length, length, there))
        for first, last in ((length - 1, length), (length - 2, length), (3, length), (length // 2, length), (0, 1), (5, length // 2)):
            part = run.run(q[first:last], *pages, _batch(table, last - first, last, there))
            if not torch.equal(part, whole[first:last]):
                found["wrong"].append(f"{length} tokens, those from {first} to {last}")
        alone = _batch(table, 1, length, there)
        found["us"].append([length, _us(partial(run.run, q[-1:], *pages, alone))])
    print(f"attention that depends on company: {found['wrong']}; decode {found['us']} µs", flush=True)
    return found


def _batch(table: torch.Tensor, queries: int, keys: int, there: torch.device) -> PagedBatch:
    starts = torch.tensor([0, queries], dtype=torch.int32, device=there)
    slots = torch.zeros(queries, dtype=torch.int64, device=there)
    return PagedBatch(starts, torch.tensor([keys], dtype=torch.int32, device=there), table, slots, queries, keys)


def _us(run: Callable[[], Any], times: int = 20) -> float:
    """Of one call, by the device's own clock where it has one."""
    for _ in range(3):
        run()
    if not torch.cuda.is_available():
        began = time.perf_counter()
        run()
        return 1e6 * (time.perf_counter() - began)
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(times):
        run()
    last.record()
    last.synchronize()
    return 1e3 * float(first.elapsed_time(last)) / times
