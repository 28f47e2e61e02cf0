"""Gate and up in one product with its activation, for many rows, against torch's product and the activation behind it.

`python benchmarks/gpu_gated_gemm.py [--seconds 0.5] [--rows 8192]`. The joined kernel writes half of what the product does and nothing has
to read it again: 0.7 GB a layer of an 8 B model with 8,192 tokens, 167 µs, a sixteenth of the product's time; a quarter where a row has
1,024 numbers. It wins if its product is as much slower at most. Each way runs alone for `--seconds`, by turns, since a card at its power
limit is slower than a fresh one; the median of the turns counts. Results are compared with torch's in float32 on some rows first.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from pagoda.ops.activation import ActivationFacts
from pagoda.ops.triton.pointwise import SiluAndMul
from triton.tools.tensor_descriptor import TensorDescriptor

SHAPES = {"0.6B": (1024, 3072), "8B": (4096, 14336)}
"""Numbers of a row, and of its activation."""
TURNS, CALLS = 3, 10


class Cut(NamedTuple):
    """Rows, columns of gate and as many of up, and inner numbers of a tile; tiles in a column of their order. woven: rows of
    weights are gate's and up's by turns, so that one product of twice the columns gives both, and a thread has both of a number."""

    rows: int
    columns: int
    inner: int
    warps: int
    stages: int
    group: int = 8
    woven: bool = False


CUTS = (
    Cut(128, 128, 64, 8, 3), Cut(128, 128, 64, 8, 4), Cut(256, 64, 64, 8, 4), Cut(256, 64, 64, 8, 3), Cut(128, 64, 64, 4, 4),
    Cut(128, 64, 128, 8, 3), Cut(128, 128, 64, 8, 3, 16), Cut(128, 128, 64, 8, 3, 8, True), Cut(128, 128, 64, 8, 4, 8, True),
    Cut(128, 128, 64, 8, 3, 16, True), Cut(256, 64, 64, 8, 4, 8, True), Cut(128, 64, 64, 4, 4, 8, True),
)  # fmt: skip


@triton.jit
def _gated(x, weight, out, rows, columns, INNER: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
           GROUP: tl.constexpr, PROGRAMS: tl.constexpr, WOVEN: tl.constexpr):  # fmt: skip
    """As many programs as processors, each taking tile after tile."""
    down, across = tl.cdiv(rows, BLOCK_M), tl.cdiv(columns, BLOCK_N)
    for tile in tl.range(tl.program_id(0), down * across, PROGRAMS, flatten=True):
        band = tile // (GROUP * across)
        height = tl.minimum(down - band * GROUP, GROUP)
        row = (band * GROUP + tile % (GROUP * across) % height) * BLOCK_M
        column = tile % (GROUP * across) // height * BLOCK_N
        if WOVEN:
            both = tl.zeros([BLOCK_M, 2 * BLOCK_N], tl.float32)
            for k in range(0, INNER, BLOCK_K):
                both = tl.dot(x.load([row, k]), weight.load([2 * column, k]).T, both)
            gate, up = tl.split(tl.reshape(both, [BLOCK_M, BLOCK_N, 2]))
        else:
            gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for k in range(0, INNER, BLOCK_K):
                a = x.load([row, k])
                gate = tl.dot(a, weight.load([column, k]).T, gate)
                up = tl.dot(a, weight.load([columns + column, k]).T, up)
        out.store([row, column], (gate / (1.0 + tl.exp(-gate)) * up).to(out.dtype))


def gated(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, cut: Cut, programs: int) -> None:
    """x `[T, K]`, weight `[2 F, K]`, gate's rows first or woven; `out` `[T, F]` is written. F is a multiple of the tile's columns."""
    width = cut.columns * (2 if cut.woven else 1)
    described = [
        TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), block)
        for tensor, block in ((x, [cut.rows, cut.inner]), (weight, [width, cut.inner]), (out, [cut.rows, cut.columns]))
    ]
    _gated[(programs,)](
        *described, x.shape[0], out.shape[1], INNER=x.shape[1], BLOCK_M=cut.rows, BLOCK_N=cut.columns, BLOCK_K=cut.inner, GROUP=cut.group,
        PROGRAMS=programs, WOVEN=cut.woven, num_warps=cut.warps, num_stages=cut.stages,
    )  # fmt: skip


def expected(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    gate, up = (x.float() @ weight.float().T).chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def woven(weight: torch.Tensor) -> torch.Tensor:
    return torch.stack(weight.chunk(2), 1).flatten(0, 1)


def ways(rows: int, inner: int, hidden: int) -> dict[str, Callable[[], Any]]:
    """Each writes its result of the same inputs; those that do not compile or are wrong are left out, and said."""
    x = torch.randn(rows, inner, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(2 * hidden, inner, device="cuda", dtype=torch.bfloat16) * inner**-0.5
    both, act = torch.empty(rows, 2 * hidden, device="cuda", dtype=torch.bfloat16), SiluAndMul(ActivationFacts("bfloat16", "silu"))
    out = torch.empty(rows, hidden, device="cuda", dtype=torch.bfloat16)
    programs = torch.cuda.get_device_properties(0).multi_processor_count
    found: dict[str, Callable[[], Any]] = {
        "torch's product": lambda: torch.mm(x, weight.T, out=both),
        "activation": lambda: act.run(both),
        "torch's product, activation": lambda: act.run(torch.mm(x, weight.T, out=both)),
    }
    weights = {False: weight, True: woven(weight)}
    some = torch.tensor([0, 1, rows // 2 + 77, rows - 1], device="cuda")
    want = expected(x[some], weight)
    for cut in CUTS:
        out.fill_(float("nan"))
        try:
            gated(x, weights[cut.woven], out, cut, programs)
            error = float((out[some].float() - want).abs().max() / want.abs().max())
        except Exception as trouble:
            print(f"  {tuple(cut)}: {type(trouble).__name__} {str(trouble)[:120]!r}", flush=True)
            continue
        if not out.isfinite().all() or error > 0.01:
            print(f"  {tuple(cut)}: wrong, error {error:.3g}", flush=True)
            continue
        found[f"joined {tuple(cut)}"] = lambda cut=cut: gated(x, weights[cut.woven], out, cut, programs)  # type: ignore[misc]
    return found


def captured(call: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    return graph


def sustained(graph: torch.cuda.CUDAGraph, seconds: float) -> float:
    """µs a call in the second half of the time."""
    began = time.perf_counter()
    while time.perf_counter() - began < seconds / 2:
        graph.replay()
        torch.cuda.synchronize()
    count, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds / 2:
        for _ in range(4):
            graph.replay()
        torch.cuda.synchronize()
        count += 4
    return 1e6 * (time.perf_counter() - began) / count / CALLS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--models", default=",".join(SHAPES))
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--out", type=Path, default=Path("gpu-gated-gemm.json"))
    options = parser.parse_args()
    result: dict[str, Any] = {"device": torch.cuda.get_device_name(), "rows": options.rows, "date": time.strftime("%Y-%m-%d"), "us": {}}
    for model in options.models.split(","):
        inner, hidden = SHAPES[model]
        graphs = {name: captured(call) for name, call in ways(options.rows, inner, hidden).items()}
        times: dict[str, list[float]] = {name: [] for name in graphs}
        for _ in range(TURNS):
            for name, graph in graphs.items():
                times[name].append(sustained(graph, options.seconds))
        found = result["us"][model] = {name: statistics.median(all_) for name, all_ in times.items()}
        flops = 4.0 * options.rows * inner * hidden
        for name, us in sorted(found.items(), key=lambda item: item[1]):
            print(f"{model:5} {name:42} {us:9.1f} us" + (f" {flops / us / 1e6:6.0f} TFLOP/s" if name != "activation" else ""), flush=True)
        options.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
