"""Gate and up in one product with its activation, for many rows, against torch's product and the activation behind it.

`python benchmarks/gpu_gated_gemm.py [--seconds 0.5] [--rows 256,8192]`. The joined kernel writes half of what the product does and nothing
has to read it again: 0.7 GB a layer of an 8 B model with 8,192 tokens, 167 µs, a sixteenth of the product's time; a quarter where a row has
1,024 numbers. It wins if its product is as much slower at most. Each way runs alone for `--seconds`, by turns, since a card at its power
limit is slower than a fresh one; the median of the turns counts. Results are compared with torch's in float32 on some rows first.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import torch
from pagoda.ops.activation import ActivationFacts
from pagoda.ops.triton.gated_gemm import LARGE, SMALL, GatedCut, gated_gemm
from pagoda.ops.triton.pointwise import SiluAndMul

SHAPES = {"0.6B": (1024, 3072), "8B": (4096, 14336)}
"""Numbers of a row, and of its activation."""
TURNS, CALLS = 3, 10

CUTS = (
    LARGE, LARGE._replace(group=8), LARGE._replace(stages=4), SMALL, SMALL._replace(stages=3), SMALL._replace(group=8),
    GatedCut(256, 64, 64, 8, 4), GatedCut(64, 128, 64, 4, 4), GatedCut(128, 64, 128, 8, 3),
)  # fmt: skip


def expected(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    gate, up = (x.float() @ weight.float().T).chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def ways(rows: int, inner: int, hidden: int) -> dict[str, Callable[[], Any]]:
    """Each writes its result of the same inputs; those that do not compile or are wrong are left out, and said."""
    x = torch.randn(rows, inner, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(2 * hidden, inner, device="cuda", dtype=torch.bfloat16) * inner**-0.5
    both, act = torch.empty(rows, 2 * hidden, device="cuda", dtype=torch.bfloat16), SiluAndMul(ActivationFacts("bfloat16", "silu"))
    found: dict[str, Callable[[], Any]] = {
        "torch's product": lambda: torch.mm(x, weight.T, out=both),
        "activation": lambda: act.run(both),
        "torch's product, activation": lambda: act.run(torch.mm(x, weight.T, out=both)),
    }
    some = torch.tensor([0, 1, rows // 2 + 77, rows - 1], device="cuda")
    want = expected(x[some], weight)
    for cut in CUTS:
        try:
            out = gated_gemm(x, weight, cut)
            error = float((out[some].float() - want).abs().max() / want.abs().max())
        except Exception as trouble:
            print(f"  {tuple(cut)}: {type(trouble).__name__} {str(trouble)[:120]!r}", flush=True)
            continue
        if not out.isfinite().all() or error > 0.01:
            print(f"  {tuple(cut)}: wrong, error {error:.3g}", flush=True)
            continue
        found[f"joined {tuple(cut)}"] = lambda cut=cut: gated_gemm(x, weight, cut)  # type: ignore[misc]
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
    parser.add_argument("--rows", default="8192", help="with commas between")
    parser.add_argument("--models", default=",".join(SHAPES))
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--out", type=Path, default=Path("gpu-gated-gemm.json"))
    options = parser.parse_args()
    result: dict[str, Any] = {"device": torch.cuda.get_device_name(), "date": time.strftime("%Y-%m-%d"), "us": {}}
    for rows, model in product(map(int, options.rows.split(",")), options.models.split(",")):
        inner, hidden = SHAPES[model]
        graphs = {name: captured(call) for name, call in ways(rows, inner, hidden).items()}
        times: dict[str, list[float]] = {name: [] for name in graphs}
        for _ in range(TURNS):
            for name, graph in graphs.items():
                times[name].append(sustained(graph, options.seconds))
        found = result["us"][f"{model}, {rows} rows"] = {name: statistics.median(all_) for name, all_ in times.items()}
        flops = 4.0 * rows * inner * hidden
        for name, us in sorted(found.items(), key=lambda item: item[1]):
            print(
                f"{model:5} {rows:5} {name:42} {us:9.1f} us" + (f" {flops / us / 1e6:6.0f} TFLOP/s" if name != "activation" else ""),
                flush=True,
            )
        options.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
