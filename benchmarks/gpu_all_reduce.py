"""Sums over the GPUs of one host, by NCCL and in one kernel: `python benchmarks/gpu_all_reduce.py [--world N] [--out FILE]`.

Every figure is the median µs of one call inside a CUDA graph of many, the largest over the ranks: of a sum of `rows` of width 4,096 in
bfloat16, and of a sum with the residual addition and norm behind it, which is two kernels with NCCL. With fewer GPUs than two there is
nothing to measure, which it says and ends with 2.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from gpu_kernels import timed
from pagoda.backends.cuda.comm import CudaCommunicator
from pagoda.hal.comm import Topology
from pagoda.hal.discovery import find
from pagoda.ops.norm import NormFacts
from pagoda.ops.triton.pointwise import AddRmsNorm
from pagoda.serving.conformance.ranks import free_port

WIDTH, EPS = 4096, 1e-6
ROWS = (1, 8, 32, 64, 128, 256, 512)
CALLS, REPEATS = 20, 15


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, default=torch.cuda.device_count())
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.world < 2 or options.world > torch.cuda.device_count():
        print(f"not run: {torch.cuda.device_count()} GPUs are here, and {max(options.world, 2)} are needed")
        return 2
    with mp.Manager() as manager:
        times = manager.dict()
        mp.spawn(measure, (options.world, free_port(), times), nprocs=options.world)
        table = [_row(rows, options.world, times) for rows in ROWS]
    for line in table:
        print("  ".join(f"{key} {value if isinstance(value, int) else round(value, 1)}" for key, value in line.items() if value))
    if options.out:
        facts = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "nccl": torch.cuda.nccl.version(), "world": options.world}
        options.out.write_text(json.dumps({**facts, "width": WIDTH, "microseconds": table}, indent=1))
    return 0


def measure(rank: int, world: int, port: int, times: Any) -> None:
    """What one rank measures; `times[rows, way, rank]` are µs."""
    device = find("cuda").open(rank)
    ways = {
        direct: device.communicator(Topology(rank, world, f"127.0.0.1:{port}", f"sums {direct}", 60, direct)) for direct in (False, True)
    }
    norm = AddRmsNorm(NormFacts("bfloat16", WIDTH, EPS))
    weight = torch.ones(WIDTH, dtype=torch.bfloat16, device=device.torch_device)
    packed = norm.pack({"weight": weight})
    for rows in ROWS:
        x, residual = (torch.zeros(rows, WIDTH, dtype=torch.bfloat16, device=device.torch_device) for _ in range(2))
        for name, direct, work in (
            ("nccl", False, lambda group, x=x: group.all_reduce(x)),
            ("one kernel", True, lambda group, x=x: group.all_reduce(x)),
            ("nccl, norm", False, lambda group, x=x, r=residual: norm.run(packed, group.all_reduce(x), r)),
            ("one kernel, norm", True, lambda group, x=x, r=residual: group.all_reduce_add_norm(x, r, weight, EPS)),
        ):
            group = ways[direct]
            assert isinstance(group, CudaCommunicator)
            times[rows, name, rank] = timed([partial(work, group)] * CALLS, REPEATS) if work(group) is not None else 0.0


def _row(rows: int, world: int, times: Any) -> dict[str, float]:
    names = dict.fromkeys(name for of, name, _ in times.keys() if of == rows)  # noqa: SIM118 (a proxy)
    return {"rows": rows} | {name: max(times[rows, name, rank] for rank in range(world)) for name in names}


if __name__ == "__main__":
    sys.exit(main())
