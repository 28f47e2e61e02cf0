"""Kernels of a decode step one by one, inside a CUDA graph: `python benchmarks/gpu_kernels.py [--only products,joined,sample] [--write]`.

Prints µs a call and the share of the memory's measured rate; products are measured in every way that `ops.triton.gemm_routes` knows and
in torch's, with weights that rotate past the cache. `--write` puts the winners into the table that the kernel reads.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from pagoda.ops.activation import ActivationFacts
from pagoda.ops.linear import GemmFacts
from pagoda.ops.norm import NormFacts
from pagoda.ops.norm_gemm import NormGemmFacts, NormGemmReference
from pagoda.ops.sampling import SampleReference, SamplingFacts, SamplingRows
from pagoda.ops.triton import gemm, gemm_routes
from pagoda.ops.triton.gemm_routes import Route
from pagoda.ops.triton.norm_gemm import NormGemm
from pagoda.ops.triton.sampling import Sample

CEILING = 4.55e12
"""Bytes a second that a large read reaches on an H200."""

SHAPES = {
    "0.6B": ((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (151936, 1024)),
    "8B": ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096)),
    "30B": ((5120, 2048), (2048, 4096), (128, 2048), (151936, 2048)),
}
"""(columns, inner) of the linear layers of one rank."""

JOINED = {
    "0.6B": ((4096, 1024, False), (6144, 1024, True)),
    "8B": ((6144, 4096, False), (28672, 4096, True)),
    "30B": ((5120, 2048, False),),
}
"""(columns, inner, gated) of those that take their surroundings along."""

MEASURED = {1: 1, 16: 8, 32: 32, 64: 64}
"""Rows that a table's entry is for, and those with which it is measured."""


def timed(calls: list[Callable[[], Any]], repeats: int = 7) -> float:
    """µs a call: all of them in one graph, the median of some replays."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    graph.replay()
    for mark in marks[:-1]:
        mark.record()
        graph.replay()
    marks[-1].record()
    torch.cuda.synchronize()
    return 1e3 * statistics.median(a.elapsed_time(b) for a, b in pairwise(marks)) / len(calls)


def ways(rows: int, columns: int) -> Iterator[Route]:
    """Candidates that give every processor something to do and none too little."""
    if rows == 1:
        yield from gemm_routes.VECTORS
        yield from (way for way in gemm_routes.TURNS if columns >= 4000 * way.turns)
        return
    for way in gemm_routes.TILES:
        if way.split == 1 or 64 <= -(-columns // way.block_n) * way.split <= 800:
            yield way


def product(columns: int, inner: int, rows: int) -> dict[str, Any]:
    """torch's time and the best way's; wrong results are reported and never win."""
    gen = torch.Generator("cuda").manual_seed(0)
    weight_bytes = 2 * columns * inner
    copies = min(64, max(2, 3 * 10**8 // weight_bytes))
    weights = torch.randn(copies, columns, inner, generator=gen, device="cuda", dtype=torch.bfloat16) * inner**-0.5
    x = torch.randn(rows, inner, generator=gen, device="cuda", dtype=torch.bfloat16)
    arrived = torch.zeros(-(-columns // 16), dtype=torch.int32, device="cuda")
    true = x.double() @ weights[0].double().T if weight_bytes < 10**8 else (x.float() @ weights[0].float().T).double()
    calls = max(1, 60 // copies) * copies if weight_bytes < 10**8 else copies
    found: dict[str, Any] = {"torch": timed([partial(F.linear, x, weights[i % copies]) for i in range(calls)])}
    for way in ways(rows, columns):
        error = float(((gemm.multiply(x, weights[0], None, arrived, way) - true).norm() / true.norm()).cpu())
        if not error < 5e-3:
            print(f"  wrong: {columns}×{inner}, {rows} rows, {way}: {error}", flush=True)
            continue
        found[json.dumps(list(way))] = timed([partial(gemm.multiply, x, weights[i % copies], None, arrived, way) for i in range(calls)])
    return found


def products(models: list[str], deadline: float, save: Callable[[str, Any], None]) -> None:
    routes: list[Any] = []
    for columns, inner in [shape for model in models for shape in SHAPES[model]]:
        for entry, rows in MEASURED.items():
            if time.perf_counter() > deadline:
                print("  out of time", flush=True)
                return
            found = product(columns, inner, rows)
            best = min(found, key=lambda name: found[name])
            ours = min((name for name in found if name != "torch"), key=lambda name: found[name])
            rate = 2 * columns * inner / found[best] * 1e6
            print(
                f"  {columns}×{inner}, {rows} rows: torch {found['torch']:.2f} µs, ours {found[ours]:.2f} {ours}, "
                f"best {rate / 1e12:.2f} TB/s, {100 * rate / CEILING:.0f} %", flush=True,
            )  # fmt: skip
            won = found[ours] < 0.97 * found["torch"]
            routes.append([columns, inner, entry, json.loads(ours) if won else None])
            save("products", routes)
            save(f"{columns}x{inner}x{rows}", found)


def joined(models: list[str], deadline: float, save: Callable[[str, Any], None]) -> None:
    """Products with the addition and norm before them, and the activation after them: one kernel against one after the other."""
    routes: dict[str, list[Any]] = {"joined": [], "joined_gated": []}
    for columns, inner, gated in [shape for model in models for shape in JOINED[model]]:
        for entry, rows in MEASURED.items():
            if time.perf_counter() > deadline:
                print("  out of time", flush=True)
                return
            found = join(columns, inner, gated, rows)
            best = min((name for name in found if name != "apart"), key=lambda name: found[name], default="apart")
            name = "joined_gated" if gated else "joined"
            print(f"  {name} {columns}×{inner}, {rows} rows: apart {found['apart']:.2f} µs, joined {found[best]:.2f} {best}", flush=True)
            won = found[best] < 0.97 * found["apart"]
            routes[name].append([columns, inner, entry, json.loads(best) if won else None])
            save(name, routes[name])
            save(f"{name} {columns}x{inner}x{rows}", found)


def _joined_facts(columns: int, inner: int, gated: bool) -> NormGemmFacts:
    activation = ActivationFacts("bfloat16", "silu") if gated else None
    return NormGemmFacts(NormFacts("bfloat16", inner, 1e-6), GemmFacts("bfloat16", inner, columns), activation)


def join(columns: int, inner: int, gated: bool, rows: int) -> dict[str, Any]:
    """µs of the kernels one after the other, and of every way to do it in one."""
    facts = _joined_facts(columns, inner, gated)
    kernel, apart = NormGemm(facts), NormGemm(facts)
    apart._routes[rows] = None
    copies = min(32, max(2, 3 * 10**8 // (2 * columns * inner)))
    weights = torch.randn(copies, columns, inner, device="cuda", dtype=torch.bfloat16) * inner**-0.5
    x, residual = torch.randn(2, rows, inner, device="cuda", dtype=torch.bfloat16)
    packed = [{"weight": weight, "norm": torch.randn(inner, device="cuda", dtype=torch.bfloat16)} for weight in weights]
    true = NormGemmReference(facts).run({name: tensor.double() for name, tensor in packed[0].items()}, x.double(), residual.double())[0]
    calls = max(1, 60 // copies) * copies
    found: dict[str, Any] = {"apart": timed([partial(apart.run, packed[i % copies], x, residual) for i in range(calls)])}
    for way in gemm_routes.JOINED_VECTORS if rows == 1 else gemm_routes.JOINED:
        if not kernel.fits(way, weights[0]):
            continue
        error = float(((kernel.joined(packed[0], x, residual, way)[0] - true).norm() / true.norm()).cpu())
        if not error < 1e-2:
            print(f"  wrong: {columns}×{inner}, {rows} rows, {way}: {error}", flush=True)
            continue
        found[json.dumps(list(way))] = timed([partial(kernel.joined, packed[i % copies], x, residual, way) for i in range(calls)])
    return found


def sampling(deadline: float, save: Callable[[str, Any], None]) -> None:
    """µs of the sampler, ours and the reference's."""
    for rows in (1, 8, 256):
        for kind, spread in (("flat", 0.02), ("peaked", 3.0)):
            logits = torch.randn(rows, 151936, device="cuda") * spread
            for name, k, p, filtered in (("plain", 0, 1.0, False), ("k 20, p 0.95", 20, 0.95, True), ("p 0.95", 0, 0.95, True)):
                if time.perf_counter() > deadline:
                    return
                settings = _rows(rows, k, p, filtered)
                facts = SamplingFacts("float32", 151936)
                kernel, reference = Sample(facts), SampleReference(facts)
                same = (kernel.run(logits, settings)[0] == reference.run(logits, settings)[0]).float().mean().item()
                ours = timed([partial(kernel.run, logits, settings)] * 10)
                theirs = timed([partial(reference.run, logits, settings)] * 3, 3)
                print(f"  {rows} rows, {kind}, {name}: ours {ours:.1f} µs, reference {theirs:.1f}, same tokens {same:.3f}", flush=True)
                save(f"sample {rows} {kind} {name}", [ours, theirs, same])


def _rows(rows: int, k: int, p: float, filtered: bool) -> SamplingRows:
    ones = torch.ones(rows, device="cuda")
    seeds = torch.arange(rows, device="cuda")
    return SamplingRows(ones, ones.int() * k, ones * p, ones * 0, seeds * 7919, seeds, any_filter=filtered)


def compile_joined(part: int, of: int, models: list[str]) -> None:
    """The same for joined products."""
    jobs = [(shape, rows) for model in models for shape in JOINED[model] for rows in MEASURED.values()]
    for (columns, inner, gated), rows in jobs[part::of]:
        facts = _joined_facts(columns, inner, gated)
        weight = torch.zeros(columns, inner, dtype=torch.bfloat16, device="cuda")
        x, norm = weight[:rows].clone(), weight[0].clone()
        for way in gemm_routes.JOINED_VECTORS if rows == 1 else gemm_routes.JOINED:
            if NormGemm(facts).fits(way, weight):
                NormGemm(facts).joined({"weight": weight, "norm": norm}, x, x, way)
    torch.cuda.synchronize()


def compile_some(part: int, of: int) -> None:
    """Compile every `of`-th way for all numbers of rows; the cache on disk keeps them for the process that measures."""
    jobs = [(rows, way) for rows in MEASURED.values() for way in ways(rows, 4096)]
    kinds: dict[tuple[Any, ...], tuple[int, Route]] = {}
    for rows, way in jobs:
        kinds.setdefault((rows, way.block_n, way.block_k, way.split > 1, way.split == 0, way.warps, way.stages), (rows, way))
    weight = torch.zeros(4096, 2048, dtype=torch.bfloat16, device="cuda")
    arrived = torch.zeros(256, dtype=torch.int32, device="cuda")
    for rows, way in list(kinds.values())[part::of]:
        gemm.multiply(torch.zeros(rows, 2048, dtype=torch.bfloat16, device="cuda"), weight, None, arrived, way)
    torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="sample,products")
    parser.add_argument("--models", default="0.6B,8B")
    parser.add_argument("--seconds", type=float, default=100)
    parser.add_argument("--compile", help="PART/OF: compile only, for the processes that this one starts")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("gpu-kernels.json"))
    options = parser.parse_args()
    if options.compile:
        part, of = map(int, options.compile.split("/"))
        if "products" in options.only:
            compile_some(part, of)
        if "joined" in options.only:
            compile_joined(part, of, options.models.split(","))
        return
    deadline = time.perf_counter() + options.seconds
    result: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}

    def save(name: str, value: Any) -> None:
        result[name] = value
        options.out.write_text(json.dumps(result))

    helpers = []
    if "products" in options.only or "joined" in options.only:
        asked = ["--only", options.only, "--models", options.models]
        helpers = [subprocess.Popen([sys.executable, __file__, *asked, "--compile", f"{i}/12"]) for i in range(12)]
    if "sample" in options.only:
        sampling(deadline, save)
    for helper in helpers:
        helper.wait()
    if "products" in options.only:
        products(options.models.split(","), deadline, save)
    if "joined" in options.only:
        joined(options.models.split(","), deadline, save)
    if options.write:
        write_routes(result)


def write_routes(result: dict[str, Any]) -> None:
    """Put what was measured into the table, in place of what it says of the same products."""
    path = Path(gemm_routes.__file__).with_name("gemm_routes.json")
    known, tables = json.loads(path.read_text()), []
    for name in ("routes", "joined", "joined_gated", "fp8", "fp8_joined", "fp8_joined_gated"):
        found = result.get("products" if name == "routes" else name, ())
        routes = {tuple(route[:3]): route[3] for route in (*known.get(name, ()), *found)}
        lines = ",\n".join("  " + json.dumps([*key, way]) for key, way in routes.items())
        tables.append(f' "{name}": [\n{lines}\n ]')
    head = json.dumps({name: result[name] for name in ("device", "torch", "date")})[1:-1]
    path.write_text(f"{{\n {head},\n" + ",\n".join(tables) + "\n}\n")


if __name__ == "__main__":
    main()
