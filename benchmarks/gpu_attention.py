"""Attention kernels of a GPU on the shapes that serving has, inside CUDA graphs: `python benchmarks/gpu_attention.py [--only W4]`.

Every figure is the median of replays over layers whose pages lie apart, so that caches hold nothing of the next. The ceilings are those
measured on the device: bytes of K and V over the reading rate, operations of the causal part over the rate of matrix products.
Prints a table, the fastest kernel of each shape first, and writes JSON. `--tiles` tries the tile sizes of the Triton kernel too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pagoda.hal.discovery import find
from pagoda.hal.kernel import KernelRun
from pagoda.hal.table import KernelPolicy
from pagoda.ops.attention import AttentionFacts, HostLengths, PagedBatch
from pagoda.ops.table import candidates, kernel_table
from pagoda.ops.triton.context_rows import lay_out
from pagoda.ops.triton.paged_attention import AttentionPlan, PagedAttention
from pagoda.ops.triton.tiles import Tile

READ_BYTES_S, BF16_FLOPS = 4.55e12, 800e12
LAYERS = 4

PROMPT_TILES = tuple(
    Tile(*sizes)
    for sizes in (
        (128, 64, 8, 2, True), (128, 64, 8, 3, True), (128, 64, 8, 4, True), (128, 64, 4, 3, True), (128, 64, 4, 4, True),
        (64, 64, 4, 3, True), (128, 64, 8, 3, False), (128, 64, 8, 4, False),
    )
)  # fmt: skip
DECODE_TILES = tuple(
    Tile(*sizes)
    for sizes in (
        (16, 64, 4, 3, False), (16, 64, 4, 4, False), (16, 64, 4, 5, False), (16, 32, 4, 5, False),
        (16, 64, 4, 4, True), (16, 64, 4, 5, True), (16, 64, 2, 4, True), (16, 64, 2, 4, False),
    )
)  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """Heads of queries and of keys; of each request its new tokens, and its keys in all."""

    name: str
    heads: tuple[int, int]
    requests: tuple[tuple[int, int], ...]

    @property
    def flops(self) -> float:
        return 4 * self.heads[0] * 128 * sum(queries * keys - queries * (queries - 1) / 2 for queries, keys in self.requests)

    @property
    def floor_us(self) -> float:
        """The larger of the two times that bytes and operations need."""
        nbytes = 4 * 128 * sum(keys * self.heads[1] + queries * self.heads[0] for queries, keys in self.requests)
        return max(self.flops / BF16_FLOPS, nbytes / READ_BYTES_S) * 1e6


def shapes() -> Iterator[Shape]:
    for heads in ((16, 8), (32, 8)):
        for requests in (1, 8, 64, 256):
            for length in (512, 4096):
                yield Shape(f"decode {requests} x {length}", heads, ((1, length),) * requests)
        yield Shape("prompt 2 x 4096", heads, ((4096, 4096),) * 2)
        yield Shape("prompt 16 x 512", heads, ((512, 512),) * 16)
        yield Shape("prompt 64 x 128 on 4224", heads, ((128, 4224),) * 64)
        for requests, length in ((1, 256), (8, 128), (1, 1024), (8, 256)):
            yield Shape(f"few {requests} x {length}", heads, ((length, length),) * requests)
    for heads in ((32, 8), (16, 8), (32, 4)):
        # Steps of 8,192 tokens; as W4 has them once decodes share its steps: the end of one prompt, a whole one, the beginning of a third.
        yield Shape("W4 2 x 4096", heads, ((4096, 4096),) * 2)
        yield Shape("W4 8 x 1024", heads, ((1024, 1024),) * 8)
        yield Shape("W4 300 on 4096, 4096, 3780", heads, ((300, 4096), (4096, 4096), (3780, 3780)))


class Bench:
    """The inputs of one shape and a way to time a kernel on them."""

    def __init__(self, shape: Shape, page: int) -> None:
        self.shape, (heads, kv_heads) = shape, shape.heads
        self.facts = AttentionFacts("bfloat16", "bfloat16", heads, kv_heads, 128, 128, page, 128**-0.5)
        pages = -(-max(keys for _, keys in shape.requests) // page)
        total = len(shape.requests) * pages + 1
        self.layers = min(LAYERS, max(1, int(40e9 // (total * page * kv_heads * 512))))
        pool = torch.randn(total, self.layers, 2, kv_heads, page, 128, device="cuda", dtype=torch.bfloat16)
        self.pages = [(pool[:, i, 0].transpose(1, 2), pool[:, i, 1].transpose(1, 2)) for i in range(self.layers)]
        self.q = torch.randn(sum(queries for queries, _ in shape.requests), heads, 128, device="cuda", dtype=torch.bfloat16)
        self.batch = self._batch(total, pages, page)

    def _batch(self, total: int, pages: int, page: int) -> PagedBatch:
        count = len(self.shape.requests)
        table = (torch.randperm(total - 1, device="cuda")[: count * pages] + 1).view(count, pages)
        queries, lengths = (np.array(column, np.int32) for column in zip(*self.shape.requests, strict=True))
        starts = np.concatenate([np.zeros(1, np.int32), np.cumsum(queries, dtype=np.int32)])
        known = HostLengths(starts, lengths) if queries.max() > 1 else None
        return PagedBatch(
            torch.from_numpy(starts).cuda(), torch.from_numpy(lengths).cuda(), table.int().contiguous(),
            torch.zeros(len(self.q), dtype=torch.int64, device="cuda"), int(queries.max()), int(lengths.max()), known,
        )  # fmt: skip

    def time(self, run: Callable[[torch.Tensor, torch.Tensor], Any], repeats: int = 12) -> float:
        """Median µs of one call."""
        for k, v in self.pages[:1]:
            run(k, v), run(k, v)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for k, v in self.pages:
                run(k, v)
        events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
        graph.replay()
        for event in events:
            event.record()
            graph.replay()
        torch.cuda.synchronize()
        times = [a.elapsed_time(b) for a, b in pairwise(events)]
        return statistics.median(times) * 1e3 / self.layers

    def kernel(self, run: KernelRun) -> float:
        plan = run.plan(self.batch)
        return self.time(lambda k, v: run.run(self.q, k, v, self.batch, plan))

    def rows(self, run: KernelRun) -> tuple[float, float]:
        """Of contexts as rows: fa3 alone, and laying them alone."""
        prompts, out = run.plan(self.batch).prompts[0], torch.empty_like(self.q)
        rows = [lay_out(k, v, self.batch.block_table, prompts.parts, self.facts) for k, v in self.pages]
        turns = iter(rows * 4)
        alone = self.time(lambda k, v: prompts.wrapper.run(self.q, *next(turns), out=out))
        return alone, self.time(lambda k, v: lay_out(k, v, self.batch.block_table, prompts.parts, self.facts))

    def tile(self, run: PagedAttention, tile: Tile, splits: int) -> float:
        plan = AttentionPlan((run.part(self.batch, slice(0, len(self.q)), tile, splits),), True)
        return self.time(lambda k, v: run.run(self.q, k, v, self.batch, plan))


def kernels(facts: AttentionFacts) -> Iterator[tuple[str, KernelRun]]:
    """Every kernel that accepts the facts, the reference apart."""
    backend = find("cuda")
    info = backend.devices()[0]
    for kernel in candidates(backend):
        if kernel.op == "paged_attention" and kernel.name != "reference" and kernel.refuse(info, facts) is None:
            yield kernel.name, kernel_table(backend, info, KernelPolicy({kernel.op: kernel.name})).resolve(kernel.op, facts)


def tiles(bench: Bench) -> Iterator[tuple[str, Callable[[], float]]]:
    run, single = PagedAttention(bench.facts), bench.batch.max_query == 1
    usual = run.part(bench.batch, slice(0, 0)).splits
    for tile in DECODE_TILES if single else PROMPT_TILES:
        for splits in sorted({usual, max(usual // 2, 1), usual * 2}) if single and tile == DECODE_TILES[1] else (usual,):
            yield f"{tuple(tile)} / {splits}", lambda tile=tile, splits=splits: bench.tile(run, tile, splits)  # type: ignore[misc]


def measure(shape: Shape, options: argparse.Namespace) -> list[tuple[float, str]]:
    bench, found = Bench(shape, options.page), []
    todo: list[tuple[str, Callable[[], float]]] = [
        (name, lambda run=run: bench.kernel(run))
        for name, run in kernels(bench.facts)  # type: ignore[misc]
        if options.kernels in name
    ]
    if options.tiles and shape.heads == (16, 8):
        todo += tiles(bench)
    for name, call in todo:
        try:
            found.append((call(), name))
        except Exception as error:
            print(f"  {shape.name} {name} failed: {str(error)[:160]!r}", flush=True)
    rows = dict(kernels(bench.facts)).get("flashinfer_rows")
    if rows is not None and bench.batch.max_query > 1:
        found += zip(bench.rows(rows), ("fa3 on rows, alone", "laying rows, alone"), strict=True)
    return sorted(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page", type=int, default=64)
    parser.add_argument("--tiles", action="store_true")
    parser.add_argument("--only", default="", help="part of the shapes' names")
    parser.add_argument("--kernels", default="", help="part of the kernels' names")
    parser.add_argument("--deadline", type=float, default=1e9)
    parser.add_argument("--out", type=Path, default=Path("gpu-attention.json"))
    options = parser.parse_args()
    start, rows = time.perf_counter(), []
    for shape in shapes():
        if options.only not in shape.name or time.perf_counter() - start > options.deadline:
            continue
        for us, name in measure(shape, options):
            share = shape.floor_us / us
            tflops = 0.0 if "laying" in name else shape.flops / us / 1e6
            found = {"kernel": name, "us": us, "share_of_ceiling": share, "tflops": tflops}
            rows.append({"shape": shape.name, "heads": shape.heads, **found})
            print(f"{shape.name:28} {shape.heads!s:8} {name:32} {us:9.1f} us  {share:5.0%}  {tflops:5.0f} TFLOP/s", flush=True)
        options.out.write_text(json.dumps({"device": torch.cuda.get_device_name(), "page": options.page, "rows": rows}, indent=1))
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
