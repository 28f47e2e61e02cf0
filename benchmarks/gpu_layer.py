"""Layers as a decode step runs them, in one CUDA graph: `python benchmarks/gpu_layer.py [--write]`, Llama's 8B with float8 weights or
(`--model 0.6B`, `--model 8B-bf16`) Qwen3's 0.6B or the 8B in bfloat16.

Splits of attention and ways of each product are tried in their surroundings, where kernels start before others end. Prints µs a layer;
`--write` puts the winners into the table that the kernels read.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton.language as tl
from gpu_attention import Bench, Shape
from gpu_kernels import timed, write_routes
from pagoda.ops.act_gemm import ActGemmFacts
from pagoda.ops.activation import ActivationFacts
from pagoda.ops.linear import GemmFacts
from pagoda.ops.linear_fp8 import GemmFp8Facts, quantised
from pagoda.ops.norm import NormFacts
from pagoda.ops.norm_gemm import NormGemmFacts
from pagoda.ops.triton import order
from pagoda.ops.triton.act_gemm import ActGemm
from pagoda.ops.triton.gemm import Gemm, multiply
from pagoda.ops.triton.gemm_fp8 import GemmFp8
from pagoda.ops.triton.gemm_routes import JOINED, JOINED_VECTORS, ONE_SCALE, TURNS, VECTORS, Fp8Route, Route, route
from pagoda.ops.triton.norm_gemm import NormGemm
from pagoda.ops.triton.norm_gemm_fp8 import NormGemmFp8
from pagoda.ops.triton.paged_attention import PagedAttention

SHAPES = {"qkv": (6144, 4096), "out": (4096, 4096), "up": (28672, 4096), "down": (4096, 14336)}
"""(columns, inner) of a layer's products, in their order."""
LAYERS = 6
HELPED = 5
"""Seconds from which on other processes compile what is tried."""
TILES = ((32, 128, 5), (32, 256, 3), (16, 256, 4), (64, 128, 4))
"""Columns, inner numbers and stages that are tried."""


SMALL = {"qkv": (4096, 1024), "out": (1024, 2048), "up": (6144, 1024), "down": (1024, 3072)}


class Plain:
    """Some layers in bfloat16 with weights of their own, `rows` requests (several) behind `context` keys; without rotation."""

    def __init__(self, rows: int, context: int, small: bool) -> None:
        self.shapes, self.layers, self.heads = (SMALL, 12, (16, 8)) if small else (SHAPES, LAYERS, (32, 8))
        self.width = self.shapes["qkv"][1]
        self.rows, self.bench = rows, Bench(Shape("layer", self.heads, ((1, context),) * rows), 64)
        self.attention = PagedAttention(self.bench.facts)
        self.plan = self.attention.plan(replace(self.bench.batch, max_seq=8192))
        facts = {name: GemmFacts("bfloat16", inner, columns) for name, (columns, inner) in self.shapes.items()}
        norm, act = NormFacts("bfloat16", self.width, 1e-6), ActivationFacts("bfloat16", "silu")
        self.joined = {"qkv": NormGemm(NormGemmFacts(norm, facts["qkv"])), "up": NormGemm(NormGemmFacts(norm, facts["up"], act))}
        self.gemms = {name: self.joined[name]._gemm if name in self.joined else Gemm(one) for name, one in facts.items()}
        self.weights = [{name: self._weight(*shape) for name, shape in self.shapes.items()} for _ in range(self.layers)]
        self.x = torch.randn(rows, self.width, device="cuda", dtype=torch.bfloat16)

    def _weight(self, columns: int, inner: int) -> dict[str, torch.Tensor]:
        weight = torch.randn(columns, inner, device="cuda", dtype=torch.bfloat16) * inner**-0.5
        return {"weight": weight, "norm": torch.ones(inner, device="cuda", dtype=torch.bfloat16)}

    def run(self, attend: bool = True) -> torch.Tensor:
        x, residual, gemms = self.x, self.x, self.gemms
        for index, packed in enumerate(self.weights):
            qkv, residual = self.joined["qkv"].run(packed["qkv"], x, residual)
            q = qkv[:, : 128 * self.heads[0]].unflatten(1, (self.heads[0], 128))
            pages = self.bench.pages[index % len(self.bench.pages)]
            seen = self.attention.run(q, *pages, self.bench.batch, self.plan) if attend else q
            gate, residual = self.joined["up"].run(packed["up"], gemms["out"].run(packed["out"], seen.flatten(1)), residual)
            x = gemms["down"].run(packed["down"], gate)
        return x

    def use(self, name: str, way: Route | None) -> None:
        self.gemms[name]._routes[self.rows] = way

    def way(self, name: str) -> Route | None:
        return route(self.rows, *self.shapes[name])

    def time(self, attend: bool = True) -> float:
        return timed([partial(self.run, attend)]) / self.layers

    def ways(self, name: str) -> list[Route | None]:
        """Candidates of this product: torch's, and tiles that give every processor something to do."""
        columns, inner = self.shapes[name]
        found: list[Route | None] = [None, *((*VECTORS, *TURNS) if self.rows == 1 else ())]
        for block_n, block_k, stages in TILES:
            for split in (1, 2, 3, 4, 6):
                steps = inner / block_k / split
                if 120 <= columns / block_n * split <= 800 and steps >= 1:
                    found.append(Route(block_n, block_k, split, 4, stages))
        return found


class Layers:
    """Some layers with weights of their own, `rows` requests behind `context` keys."""

    shapes = SHAPES

    def __init__(self, rows: int, context: int) -> None:
        self.rows, self.bench = rows, Bench(Shape("layer", (32, 8), ((1, context),) * rows), 64)
        self.attention = PagedAttention(self.bench.facts)
        self.plan = self.attention.plan(replace(self.bench.batch, max_seq=8192))  # as a step that is captured for any length
        facts = {name: GemmFp8Facts("bfloat16", inner, columns) for name, (columns, inner) in SHAPES.items()}
        norm = NormFacts("bfloat16", 4096, 1e-5)
        self.qkv, self.up = (NormGemmFp8(NormGemmFacts(norm, facts[name], None)) for name in ("qkv", "up"))
        self.out = GemmFp8(facts["out"])
        self.down = ActGemm(ActGemmFacts(ActivationFacts("bfloat16", "silu"), facts["down"]))
        self.gemms = {"qkv": self.qkv._gemm, "out": self.out, "up": self.up._gemm, "down": self.down._gemm}
        self.weights = [{name: self._packed(*shape) for name, shape in SHAPES.items()} for _ in range(LAYERS)]
        self.x = torch.randn(rows, 4096, device="cuda", dtype=torch.bfloat16)

    def _packed(self, columns: int, inner: int) -> dict[str, torch.Tensor]:
        weight, scale = quantised(torch.randn(columns, inner, device="cuda") * inner**-0.5)
        return {"weight": weight, "scale": scale, "norm": torch.ones(inner, device="cuda", dtype=torch.bfloat16)}

    def run(self, attend: bool = True) -> torch.Tensor:
        x, residual = self.x, self.x
        for index, packed in enumerate(self.weights):
            qkv, residual = self.qkv.run(packed["qkv"], x, residual)
            q = qkv[:, :4096].unflatten(1, (32, 128))
            pages = self.bench.pages[index % len(self.bench.pages)]
            seen = self.attention.run(q, *pages, self.bench.batch, self.plan) if attend else q
            x = self.out.run(packed["out"], seen.flatten(1))
            gate, residual = self.up.run(packed["up"], x, residual)
            x = self.down.run(packed["down"], gate)
        return x

    def use(self, name: str, way: Fp8Route | None) -> None:
        self.gemms[name]._routes[self.rows] = way

    def way(self, name: str) -> Fp8Route | None:
        return self.gemms[name].way(self.rows)

    @staticmethod
    def ways(name: str) -> list[Fp8Route]:
        """Candidates of this product: programs for all processors."""
        splits = {"qkv": (2, 4), "out": (3, 6), "up": (1,), "down": (3, 4)}[name]
        tiles = [(64, 256, 4, 3, split) for split in splits] + ([(128, 128, 8, 4, 1)] if name == "up" else [])
        return [
            *(Fp8Route(block_n, block_k, split, warps, stages, 64, True) for block_n, block_k, warps, stages, split in tiles),
            ONE_SCALE,
        ]

    def time(self, attend: bool = True) -> float:
        return timed([partial(self.run, attend)]) / LAYERS


def attention(layers: Plain | Layers, save: Callable[[str, Any], None]) -> None:
    """µs a layer by splits of attention, merged by the last program of a group or by a kernel of its own."""
    plan, found = layers.plan, {}
    zeros = layers.attention.arrived(layers.bench.batch)
    for splits in sorted({plan.parts[0].splits, 2, 4, 8, 16}):
        for name, arrived in (("", None), (", merged in passing", zeros)):
            layers.plan = plan._replace(parts=(plan.parts[0]._replace(splits=splits, arrived=arrived),))
            found[f"{splits} splits{name}"] = layers.time()
    layers.plan = plan
    print(f"  {layers.rows} rows, attention: { ({name: round(value, 2) for name, value in found.items()}) }", flush=True)
    save(f"{layers.rows} rows, attention", found)


def surroundings(layers: Plain, best: float, true: torch.Tensor, save: Callable[[str, Any], None]) -> float:
    """µs a layer by whether products take the addition and norm before them along, and the activation after them; the best stays."""
    rows = layers.rows
    for name, product in layers.joined.items():
        winner, times = product.way(rows), dict[str, float]()
        for way in (None, *(JOINED_VECTORS if rows == 1 else JOINED)):
            if way is not None and not product.fits(way, layers.weights[0][name]["weight"]):
                continue
            product._routes[rows] = way
            error = float(((layers.run().float() - true).norm() / true.norm()).cpu())
            spent = times[json.dumps(way and list(way))] = layers.time()
            if not error < 0.1:
                print(f"  wrong: {name} {way} {error}", flush=True)
            elif spent < best - 0.1 or way == winner:
                best, winner = min(best, spent), way
        product._routes[rows] = winner
        print(f"    norm and {name}: {best:.2f} µs a layer with {winner}; { ({k: round(v, 2) for k, v in times.items()}) }", flush=True)
        save(f"{rows} rows, norm and {name}", {"times": times, "best": winner and list(winner)})
    return best


def search(layers: Plain | Layers, deadline: float, save: Callable[[str, Any], None]) -> list[list[Any]]:
    """The best way of one product after the other, the others as they are best so far."""
    rows = layers.rows
    found: dict[str, dict[str, float]] = {}
    attention(layers, save)
    best = layers.time()
    true = layers.run().float()
    print(
        f"  {rows} rows: by the table {best:.2f} µs a layer, again {layers.time():.2f}, without attention {layers.time(False):.2f}",
        flush=True,
    )
    if isinstance(layers, Plain):
        best = surroundings(layers, best, true, save)
    chosen = {}
    for name in layers.gemms:
        winner, times = layers.way(name), found.setdefault(name, {})
        for way in layers.ways(name):
            if time.perf_counter() > deadline:
                break
            layers.use(name, way)
            error = float(((layers.run().float() - true).norm() / true.norm()).cpu())
            spent = times[json.dumps(way and list(way))] = layers.time()
            if not error < 0.1:
                print(f"  wrong: {name} {way} {error}", flush=True)
            elif spent < best - 0.1:
                best, winner = spent, way
        layers.use(name, winner)
        chosen[name] = winner
        print(f"    {name}: {best:.2f} µs a layer with {winner}; { ({k: round(v, 2) for k, v in times.items()}) }", flush=True)
        save(f"{rows} rows, {name}", times)
    return [[*layers.shapes[name], {1: 1, 8: 16}.get(rows, rows), list(way) if way else None] for name, way in chosen.items()]


def compile_some(part: int, of: int, counts: list[int]) -> None:
    """Compile every `of`-th way of a bfloat16 product; the cache on disk keeps them for the process that measures."""
    weight, arrived = torch.zeros(4096, 3072, dtype=torch.bfloat16, device="cuda"), torch.zeros(256, dtype=torch.int32, device="cuda")
    jobs = [(rows, Route(block_n, block_k, split, 4, stages)) for rows in counts for block_n, block_k, stages in TILES for split in (1, 2)]
    for rows, way in jobs[part::of]:
        multiply(torch.zeros(rows, 3072, dtype=torch.bfloat16, device="cuda"), weight, None, arrived, way)
    torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=("8B", "0.6B", "8B-bf16"), default="8B")
    parser.add_argument("--compile", help="PART/OF: compile only, for the processes that this one starts")
    parser.add_argument("--rows", default="1,8")
    parser.add_argument("--context", type=int, default=384)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--after-wait", action="store_true", help="kernels let the next one start when they have waited, not before")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("gpu-layer.json"))
    options = parser.parse_args()
    plain = options.model != "8B"
    order.AFTER_WAIT = tl.constexpr(options.after_wait)  # before any kernel is made
    if options.compile:
        return compile_some(*map(int, options.compile.split("/")), [int(rows) for rows in options.rows.split(",")])
    if plain and options.seconds > HELPED:
        asked = [sys.executable, __file__, "--rows", options.rows, "--model", options.model, *["--after-wait"] * options.after_wait]
        for helper in [subprocess.Popen([*asked, "--compile", f"{part}/12"]) for part in range(12)]:
            helper.wait()
    results: dict[str, Any] = {"after_wait": options.after_wait, "device": torch.cuda.get_device_name(), "torch": torch.__version__}
    results["date"] = subprocess.run(["date", "+%F"], capture_output=True, text=True, check=True).stdout.strip()

    def save(name: str, value: Any) -> None:
        results[name] = value
        options.out.write_text(json.dumps(results, indent=1))

    begin, counts = time.perf_counter(), [int(rows) for rows in options.rows.split(",")]
    routes: list[list[Any]] = []
    for index, rows in enumerate(counts):
        layers = Plain(rows, options.context, options.model == "0.6B") if plain else Layers(rows, options.context)
        routes += search(layers, begin + options.seconds * (index + 1) / len(counts), save)
    save("products" if plain else "fp8", routes)
    if options.write:
        write_routes(results)


if __name__ == "__main__":
    main()
