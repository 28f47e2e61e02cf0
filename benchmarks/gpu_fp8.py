"""Products with float8 weights one by one, inside a CUDA graph: `python benchmarks/gpu_fp8.py [--models 8B] [--write]`.

Prints µs a call and the share of the memory's measured rate in every way that `ops.triton.gemm_routes` knows, in torch's with a scale
for each row, and in torch's with one scale; weights rotate past the cache. `--write` puts the winners into the table that the kernel reads.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_kernels import CEILING, JOINED, SHAPES, timed, write_routes
from pagoda.ops.activation import ActivationFacts
from pagoda.ops.linear_fp8 import GemmFp8Facts, quantised
from pagoda.ops.norm import NormFacts
from pagoda.ops.norm_gemm import NormGemmFacts, NormGemmReference
from pagoda.ops.triton import fp8_rows, gemm_fp8, gemm_routes
from pagoda.ops.triton.gemm_routes import Fp8Route
from pagoda.ops.triton.norm_gemm_fp8 import NormGemmFp8

MEASURED = {1: 1, 16: 8, 32: 32, 64: 64, 128: 128, 256: 256}
"""Rows that a table's entry is for, and those with which it is measured."""
TORCH_ONLY = (512, 2048, 8192)
"""Rows whose rates are printed beside."""
WIDE = (
    Fp8Route(128, 128, 1, 4, 4, 128, True), Fp8Route(128, 128, 1, 8, 4, 128, True), Fp8Route(128, 128, 1, 8, 3, 256, True),
    Fp8Route(64, 128, 1, 4, 4, 128, True), Fp8Route(64, 128, 2, 4, 4, 128, True), Fp8Route(128, 128, 2, 8, 4, 128, True),
)  # fmt: skip


def ways(rows: int, columns: int) -> Iterator[Fp8Route]:
    """Candidates that give every processor something to do and none too little."""
    if rows == 1:
        yield from gemm_routes.FP8_VECTORS
    for way in gemm_routes.FP8_TILES if rows <= 64 else WIDE:
        if way.split == 1 or (rows <= way.block_m and 64 <= -(-columns // way.block_n) * way.split <= 800):
            yield way


class Product:
    """One shape with weights enough to miss the cache."""

    def __init__(self, columns: int, inner: int, rows: int) -> None:
        copies = min(64, max(2, 3 * 10**8 // (columns * inner)))
        self.facts, self.rows = GemmFp8Facts("bfloat16", inner, columns), rows
        plain = torch.randn(columns, inner, device="cuda") * inner**-0.5
        weight, scale = quantised(plain)
        self.packed = [{"weight": weight.clone(), "scale": scale} for _ in range(copies)]
        self.x = torch.randn(rows, inner, device="cuda", dtype=torch.bfloat16)
        self.coded = fp8_rows.coded(self.x)
        self.arrived = torch.zeros(-(-columns // 16), dtype=torch.int32, device="cuda")
        self.true = self.x.float() @ (weight.float() * scale[:, None]).T
        self.calls = max(1, 60 // copies) * copies if rows <= 256 else copies

    def run(self, way: Fp8Route, packed: dict[str, torch.Tensor]) -> torch.Tensor:
        x, scale = self.coded if way.both else (self.x, None)
        return gemm_fp8.multiply(self.facts, packed, x, scale, torch.bfloat16, self.arrived, way)

    def time(self, call: Callable[[dict[str, torch.Tensor]], Any]) -> float:
        return timed([partial(call, self.packed[i % len(self.packed)]) for i in range(self.calls)])

    def measured(self) -> dict[str, float]:
        """µs in torch's two ways, and in ours that are right."""
        found = {"torch": self.time(lambda packed: gemm_fp8.scaled_mm(packed, self.coded, torch.bfloat16))}
        found["torch, one scale"] = self.time(lambda packed: gemm_fp8.one_scale(packed, self.coded, torch.bfloat16))
        for way in ways(self.rows, self.facts.out_features) if self.rows in MEASURED.values() else ():
            error = float(((self.run(way, self.packed[0]).float() - self.true).norm() / self.true.norm()).cpu())
            if not error < (5e-2 if way.both else 5e-3):
                print(f"  wrong: {self.facts}, {self.rows} rows, {way}: {error}", flush=True)
                continue
            found[json.dumps(list(way))] = self.time(partial(self.run, way))
        return found


def products(models: list[str], deadline: float, save: Callable[[str, Any], None]) -> None:
    routes: list[Any] = []
    for columns, inner in [shape for model in models for shape in SHAPES[model][:-1]]:
        for entry, rows in (*MEASURED.items(), *((rows, rows) for rows in TORCH_ONLY)):
            if time.perf_counter() > deadline:
                print("  out of time", flush=True)
                return
            found = Product(columns, inner, rows).measured()
            own = [name for name in found if not name.startswith("torch")]
            for kind in (True, False):
                best = min((name for name in own if json.loads(name)[-1] is kind), key=lambda name: found[name], default=None)
                if best:
                    print(f"    {'float8' if kind else 'plain'} rows: {found[best]:.2f} {best}", flush=True)
            fastest = min(own, key=lambda name: found[name], default="torch")
            rate = columns * inner / found[fastest] * 1e6
            print(
                f"  {columns}×{inner}, {rows} rows: torch {found['torch']:.2f} µs, one scale {found['torch, one scale']:.2f}, ours "
                f"{found[fastest]:.2f}, {rate / 1e12:.2f} TB/s, {100 * rate / CEILING:.0f} %, {2 * rows * rate / 1e12:.0f} TFLOP/s",
                flush=True,
            )
            save(f"{columns}x{inner}x{rows}", found)
            if rows in MEASURED.values():
                routes.append([columns, inner, entry, _winner(found)])
                save("fp8", routes)


def _winner(found: dict[str, float]) -> list[Any] | None:
    """The fastest way, with what it costs to make rows float8 first where no norm or activation does."""
    cost = {name: value + (0.7 if name.startswith("torch") or json.loads(name)[-1] else 0.0) for name, value in found.items()}
    best = min(cost, key=lambda name: cost[name])
    return {"torch": None, "torch, one scale": list(gemm_routes.ONE_SCALE)}[best] if best.startswith("torch") else json.loads(best)


def joined(models: list[str], save: Callable[[str, Any], None]) -> None:
    """One row with what is around the product, in one kernel against one after the other."""
    routes: dict[str, list[Any]] = {"fp8_joined": [], "fp8_joined_gated": []}
    for columns, inner, gated in [(*shape[:2], False) for model in models for shape in JOINED[model]]:
        product = Product(columns, inner, 1)
        activation = ActivationFacts("bfloat16", "silu") if gated else None
        facts = NormGemmFacts(NormFacts("bfloat16", inner, 1e-6), product.facts, activation)
        kernel, norm = NormGemmFp8(facts), torch.randn(inner, device="cuda", dtype=torch.bfloat16)
        packed = [{**weights, "norm": norm} for weights in product.packed]
        true = NormGemmReference(facts).run(packed[0], product.x, product.x)[0].float()
        found = {"apart": timed([partial(_apart, kernel, packed[i % len(packed)], product.x) for i in range(product.calls)])}
        for way in gemm_routes.FP8_JOINED:
            error = float(((kernel.joined(packed[0], product.x, product.x, way)[0].float() - true).norm() / true.norm()).cpu())
            if error < 1e-2:
                found[json.dumps(list(way))] = timed(
                    [partial(kernel.joined, packed[i % len(packed)], product.x, product.x, way) for i in range(product.calls)]
                )
        best = min((name for name in found if name != "apart"), key=lambda name: found[name])
        print(
            f"  joined {columns}×{inner}{' gated' if gated else ''}: apart {found['apart']:.2f} µs, joined {found[best]:.2f} {best}",
            flush=True,
        )
        name = "fp8_joined_gated" if gated else "fp8_joined"
        routes[name].append([columns, inner, 1, json.loads(best) if found[best] < 0.97 * found["apart"] else None])
        save(name, routes[name])
        save(f"{name} {columns}x{inner}", found)


def _apart(kernel: NormGemmFp8, packed: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    product = kernel._normed(packed, x, x)[0]
    return product if kernel._act is None else kernel._act.run(product)


def rows_made(save: Callable[[str, Any], None]) -> None:
    """Making rows float8: alone, after a norm, after the activation; those of Llama's 8B."""
    facts, weight = NormFacts("bfloat16", 4096, 1e-6), torch.ones(4096, device="cuda", dtype=torch.bfloat16)
    for rows in (1, 8, 64, 256, 4096):
        x, wide = (torch.randn(rows, width, device="cuda", dtype=torch.bfloat16) for width in (4096, 28672))
        found = {
            "plain": timed([partial(fp8_rows.coded, x)] * 20),
            "norm": timed([partial(fp8_rows.coded_norm, facts, weight, x, x)] * 20),
            "silu": timed([partial(fp8_rows.coded_silu, wide)] * 20),
        }
        print(f"  {rows} rows made float8: {', '.join(f'{name} {value:.2f} µs' for name, value in found.items())}", flush=True)
        save(f"rows {rows}", found)


def compile_some(part: int, of: int, models: list[str]) -> None:
    """Compile every `of`-th kind of way; the cache on disk keeps them for the process that measures."""
    kinds: dict[tuple[Any, ...], tuple[int, Fp8Route]] = {}
    for rows in MEASURED.values():
        for way in ways(rows, 4096):
            kinds.setdefault((rows, *way._replace(split=min(way.split, 2))), (rows, way))
    for rows, way in list(kinds.values())[part::of]:
        gemm_fp8_once(rows, way)
    torch.cuda.synchronize()


def gemm_fp8_once(rows: int, way: Fp8Route) -> None:
    facts = GemmFp8Facts("bfloat16", 4096, 4096)
    packed = {"weight": torch.zeros(4096, 4096, device="cuda").to(torch.float8_e4m3fn), "scale": torch.ones(4096, device="cuda")}
    x, scale = torch.zeros(rows, 4096, device="cuda", dtype=torch.bfloat16), torch.ones(rows, 1, device="cuda")
    x = x.to(torch.float8_e4m3fn) if way.both else x
    arrived = torch.zeros(512, dtype=torch.int32, device="cuda")
    gemm_fp8.multiply(facts, packed, x, scale if way.both else None, torch.bfloat16, arrived, way)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="8B")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--compile", help="PART/OF: compile only, for the processes that this one starts")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("gpu-fp8.json"))
    options = parser.parse_args()
    models = options.models.split(",")
    if options.compile:
        compile_some(*map(int, options.compile.split("/")), models)
        return
    result: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}

    def save(name: str, value: Any) -> None:
        result[name] = value
        options.out.write_text(json.dumps(result))

    helpers = [subprocess.Popen([sys.executable, __file__, "--compile", f"{i}/14", "--models", options.models]) for i in range(14)]
    for helper in helpers:
        helper.wait()
    deadline = time.perf_counter() + options.seconds
    rows_made(save)
    products(models, deadline, save)
    if options.write:
        write_routes(result)
        gemm_routes.forget()
    joined(models, save)
    if options.write:
        write_routes(result)


if __name__ == "__main__":
    main()
