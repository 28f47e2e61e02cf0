"""The recurrences one by one, inside a CUDA graph: `python benchmarks/gpu_states.py [--only ssd_scan,…] [--rows 1,32,256] [--tokens 8192]`.

Shapes of Nemotron-H 8B (`causal_conv1d`, `ssd_scan`) and Qwen3-Next (`gated_delta_rule`, by head and by channel), in bfloat16 with
states in float32: decodes, and prompts. Prints µs a call and the share of the floor, which is the larger of the bytes at the memory's
measured rate and, for prompts, the chunks' products at the matrix units'. Every result is compared with the reference before it is
timed; inputs and pages rotate past the cache. Writes the same as JSON. `--device cpu` checks the script in Triton's interpreter.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from gpu_kernels import timed
from pagoda.ops.conv import CausalConvReference, ConvFacts
from pagoda.ops.delta import DeltaFacts, GatedDeltaReference
from pagoda.ops.scan import SsdFacts, SsdScanReference
from pagoda.ops.state import StateBatch
from pagoda.ops.triton.conv import CausalConv
from pagoda.ops.triton.delta import GatedDelta
from pagoda.ops.triton.ssd import SsdScan
from torch.profiler import ProfilerActivity, profile

COPY, PRODUCTS = 4.23e12, 800e12
"""Bytes a second of a large copy on an H200, and operations a second of a large product in bfloat16."""
CHUNK = 64


class Use(NamedTuple):
    """A kernel's use: (ours, reference), facts, inputs before the state, weights, the state's shape and dtype, and the counted work.

    moved: bytes of inputs and outputs a token. work: operations a token of a prompt in chunks of 64. view: pages as run sees.
    """

    kinds: tuple[Any, Any]
    facts: Any
    inputs: Callable[[int, torch.device, torch.dtype], tuple[Any, ...]]
    weights: Callable[[torch.device, torch.dtype], dict[str, torch.Tensor]] | None
    state: tuple[int, ...]
    state_dtype: str
    moved: int
    work: int
    view: Callable[[torch.Tensor], torch.Tensor] = lambda pages: pages


def conv(channels: int) -> Use:
    facts = ConvFacts("bfloat16", channels, 4, bias=True)

    def weights(device: torch.device, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        return {"weight": torch.randn(channels, 4, device=device).to(dtype), "bias": torch.randn(channels, device=device).to(dtype)}

    def inputs(tokens: int, device: torch.device, dtype: torch.dtype) -> tuple[Any, ...]:
        return (torch.randn(tokens, channels, device=device).to(dtype),)

    return Use((CausalConv, CausalConvReference), facts, inputs, weights, (3, channels), "bfloat16", 4 * channels, 0, _turned)


def _turned(pages: torch.Tensor) -> torch.Tensor:
    return pages.mT


def ssd(heads: int, dim: int, groups: int, size: int) -> Use:
    def inputs(tokens: int, device: torch.device, dtype: torch.dtype) -> tuple[Any, ...]:
        mixed = torch.randn(tokens, heads * dim + 2 * groups * size, device=device).to(dtype)
        x, b, c = mixed.split([heads * dim, groups * size, groups * size], dim=-1)
        step, bias = torch.randn(tokens, heads, device=device).to(dtype), torch.randn(heads, device=device) - 2.0
        b, c = (part.unflatten(-1, (groups, size)) for part in (b, c))
        rates = -torch.rand(heads, device=device) - 0.1
        return x.unflatten(-1, (heads, dim)), step, bias, rates, b, c, torch.ones(heads, device=device)

    moved = 4 * heads * dim + 2 * heads + 4 * groups * size
    # c · b once a group; weights · x, c · S and the state's addition by head.
    work = 2 * CHUNK * size * groups + heads * (2 * CHUNK * dim + 4 * dim * size)
    facts = SsdFacts("bfloat16", heads, dim, groups, size)
    return Use((SsdScan, SsdScanReference), facts, inputs, None, (heads, dim, size), "float32", moved, work)


def delta(k_heads: int, heads: int, dim: int, by_channel: bool) -> Use:
    def inputs(tokens: int, device: torch.device, dtype: torch.dtype) -> tuple[Any, ...]:
        keys, values, decays = k_heads * dim, heads * dim, (heads, dim) if by_channel else (heads,)
        q, k, v = torch.randn(tokens, 2 * keys + values, device=device).to(dtype).split([keys, keys, values], dim=-1)
        step, beta = (torch.randn(tokens, *shape, device=device).to(dtype) for shape in (decays, (heads,)))
        bias, rates = torch.randn(*decays, device=device) - 2.0, -torch.rand(heads, device=device) - 0.1
        return *(x.unflatten(-1, (-1, dim)) for x in (q, k, v)), step, beta, bias, rates

    moved = 4 * k_heads * dim + 4 * heads * dim + 2 * heads * (dim if by_channel else 1) + 2 * heads
    # k · k and q · k once a key head (each, where channels decay); the inverse's and weights' products, and three with the state, by head.
    pairs = 4 * CHUNK * dim * (heads if by_channel else k_heads)
    work = pairs + heads * (4 * CHUNK * dim + 6 * dim * dim)
    facts = DeltaFacts("bfloat16", k_heads, heads, dim, dim, by_channel)
    return Use((GatedDelta, GatedDeltaReference), facts, inputs, None, (heads, dim, dim), "float32", moved, work)


USES = {
    "causal_conv1d": partial(conv, 10240),
    "ssd_scan": partial(ssd, 128, 64, 8, 128),
    "gated_delta_rule": partial(delta, 16, 32, 128, False),
    "gated_delta_rule by channel": partial(delta, 32, 32, 128, True),
}
SMALL = {
    "causal_conv1d": partial(conv, 40), "ssd_scan": partial(ssd, 4, 16, 2, 16), "gated_delta_rule": partial(delta, 2, 4, 16, False),
    "gated_delta_rule by channel": partial(delta, 2, 2, 16, True),
}  # fmt: skip


def batch_of(rows: int, queries: int, at: int, device: torch.device) -> StateBatch:
    """`rows` requests with pages of their own, the first of which is page `at`."""
    starts = torch.arange(0, (rows + 1) * queries, queries, dtype=torch.int32, device=device)
    pages = torch.arange(at, at + rows, device=device)
    return StateBatch(starts, torch.zeros(rows, dtype=torch.bool, device=device), pages, pages, rows if queries > 1 else 0, queries)


def measure(use: Use, rows: int, queries: int, device: torch.device, dtype: torch.dtype, apart: bool = True) -> dict[str, Any]:
    """µs a call, the larger error of outputs and states against the reference in float32, the floor's µs, and the share of it; with
    `apart`, µs of each of its kernels."""
    tokens, width = rows * queries, 2 if use.state_dtype == "bfloat16" else 4
    numbers = 1
    for size in use.state:
        numbers *= size
    copies = max(2, min(16, 3 * 10**8 // (tokens * use.moved + rows * numbers * width))) if device.type == "cuda" else 1
    state_dtype = dtype if use.state_dtype == "bfloat16" else torch.float32
    pages = use.view(torch.randn(1 + copies * rows, *use.state, device=device).to(state_dtype))
    batches = [batch_of(rows, queries, 1 + copy * rows, device) for copy in range(copies)]
    inputs = [use.inputs(tokens, device, dtype) for _ in range(copies)]
    ours, reference = (kind(use.facts) for kind in use.kinds)
    weights = use.weights(device, dtype) if use.weights else {}
    packed, plain = ([ours.pack(weights)], [weights]) if weights else ([], [])
    # The reference needs room: it sees the first 1,024 tokens.
    seen = min(queries, 1024)
    part = batch_of(rows, seen, 1, device)
    index = torch.arange(tokens, device=device).view(rows, queries)[:, :seen].flatten()
    few = tuple(x[index] if isinstance(x, torch.Tensor) and x.shape[:1] == (tokens,) else x for x in inputs[0])
    before, after = pages.float().clone(), pages.clone()
    true = reference.run(*plain, *_wide(few), before, part)
    error = max(_off(ours.run(*packed, *few, after, part), true), _off(after, before))
    moved = tokens * use.moved + 2 * rows * numbers * width
    floor = 1e6 * max(moved / COPY, tokens * use.work / PRODUCTS if queries > 1 else 0.0)
    found: dict[str, Any] = {"error": error, "floor_us": floor, "bytes": float(moved), "operations": float(tokens * use.work)}
    if device.type == "cuda":
        calls = [
            partial(ours.run, *packed, *inputs[i % copies], pages, batches[i % copies]) for i in range(copies * (4 if queries == 1 else 1))
        ]
        found["us"] = timed(calls)
        if apart:
            found["parts"] = parts(calls[0])
        found["share"] = floor / found["us"]
    return found


def parts(call: Callable[[], Any]) -> dict[str, float]:
    """µs of each kernel of a call, by name."""
    with profile(activities=[ProfilerActivity.CUDA]) as tracer:
        call()
        torch.cuda.synchronize()
    return {event.key[:40]: round(float(event.device_time_total), 1) for event in tracer.key_averages() if event.device_time_total}


def _off(found: torch.Tensor, true: torch.Tensor) -> float:
    return float((found.float() - true).norm() / true.norm())


def _wide(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(arg.float() for arg in args)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(USES))
    parser.add_argument("--rows", default="1,32,256", help="decodes")
    parser.add_argument("--tokens", type=int, default=8192, help="of the prompt, and of eight that are as long together")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=Path("gpu-states.json"))
    options = parser.parse_args()
    device = torch.device(options.device)
    real = device.type == "cuda"
    dtype = torch.bfloat16 if real else torch.float16
    result: dict[str, Any] = {"device": torch.cuda.get_device_name() if real else "cpu", "date": time.strftime("%Y-%m-%d"), "kernels": {}}
    steps = [(int(rows), 1) for rows in options.rows.split(",")] + [(1, options.tokens), (8, options.tokens // 8)]
    for name in options.only.split(","):
        for rows, queries in steps:
            label = f"{name}, {rows} × {queries}"
            try:
                found = measure((USES if real else SMALL)[name](), rows, queries, device, dtype)
            except Exception as error:  # what is measured already stays
                found = {"failed": repr(error)}
            result["kernels"][label] = found
            print(label, {key: round(value, 4) if isinstance(value, float) else value for key, value in found.items()}, flush=True)
            options.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
