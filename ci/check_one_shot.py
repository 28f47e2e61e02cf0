"""Sums over ranks in one kernel (`ops/triton/one_shot.py`) between processes that share memory, against float64.

`python ci/check_one_shot.py [--device cuda] [--worlds 2,3]`: on the CPU in Triton's interpreter, over mapped files; on GPUs over CUDA IPC,
where more ranks than GPUs share one. In processes of their own, since Triton decides when a kernel is declared whether it is interpreted.
Calls of all sizes follow each other in a random order, on GPUs also in a captured graph; then a rank stays away, and those who wait are
let go.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

if "cuda" not in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"

import torch
import torch.multiprocessing as mp
from pagoda.ops.norm import AddRmsNormReference, NormFacts
from pagoda.ops.triton import one_shot
from pagoda.serving.conformance.ranks import free_port

EPS = 1e-6
BOUNDS = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
PATIENCE_S = 90


class Setting(NamedTuple):
    """dtypes: the interpreter has no bfloat16 that is right."""

    device: str
    width: int
    calls: int
    dtypes: tuple[torch.dtype, ...]


SETTINGS = {
    "cpu": Setting("cpu", 96, 12, (torch.float32, torch.float16)),
    "cuda": Setting("cuda", 4096, 24, (torch.bfloat16, torch.float32, torch.float16)),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=sorted(SETTINGS))
    parser.add_argument("--worlds", default="2,3")
    args = parser.parse_args()
    for world in map(int, args.worlds.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(rank_checks, (world, args.device, folder, free_port()), nprocs=world)
        print(f"{world} ranks: {SETTINGS[args.device].calls} calls of each kind hold, and a wait without end was ended")
    return 0


def rank_checks(rank: int, world: int, device: str, folder: str, port: int) -> None:
    """All that one rank does; raises where something does not hold."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)  # what is empty is filled with NaN
    watch = threading.Timer(PATIENCE_S, lambda: os._exit(1))  # a deadlock is a failure
    watch.daemon = True
    watch.start()
    setting = SETTINGS[device]
    region = _files(rank, world, Path(folder)) if device == "cpu" else _gpus(rank, world, port)
    sizes = torch.Generator().manual_seed(world)  # alike on all ranks
    for call in range(setting.calls):
        dtype = setting.dtypes[call % len(setting.dtypes)]
        most = one_shot.PROGRAMS + 12 if call % 4 == 0 else 3
        numel = int(torch.randint(1, most * one_shot.TILE, (1,), generator=sizes))
        _summed(region, numel, dtype, call)
        _normed(region, 1 + numel % (150 if call % 4 == 0 else 5), setting.width, dtype, call)
    _taken(region)
    if device == "cuda":
        _say(rank, "calls hold")
        _captured(region, setting.width)
        _say(rank, "replays hold")
    _released(region)
    watch.cancel()


def _say(rank: int, what: str) -> None:
    """So that it is seen where a deadlock is."""
    print(f"rank {rank}: {what}", flush=True)


def _files(rank: int, world: int, folder: Path) -> one_shot.Region:
    """A file for each rank, mapped by all."""
    size = one_shot.region_bytes(world)
    for one in range(world):
        with (folder / f"rank{one}").open("ab") as file:
            file.truncate(size)
    files = [str(folder / f"rank{one}") for one in range(world)]
    return one_shot.Region.over(rank, [torch.from_file(file, shared=True, size=size, dtype=torch.uint8) for file in files])


def _gpus(rank: int, world: int, port: int) -> one_shot.Region:
    """Memory of GPUs, as the backend opens it."""
    from pagoda.backends.cuda.peer_memory import open_region
    from pagoda.backends.torch_host.comm import open_store
    from pagoda.hal.comm import Topology

    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    topology = Topology(rank, world, f"127.0.0.1:{port}", "one-shot", 60)
    region = open_region(open_store(topology), topology, device)
    expect(region is not None, "there is no region")
    return region


def _contributions(region: one_shot.Region, count: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=draw).to(region.calls.device, dtype) for _ in range(count)]


def _summed(region: one_shot.Region, numel: int, dtype: torch.dtype, seed: int) -> None:
    everyone = _contributions(region, region.world, (numel,), dtype, seed)
    mine = everyone[region.rank].clone()
    expect(region.fits(mine), f"{numel} numbers do not fit")
    result = region.all_reduce(mine)
    expect(result is mine, "not in place")
    _close(result, torch.stack(everyone).double().sum(0), f"sum of {numel}")


def _normed(region: one_shot.Region, rows: int, width: int, dtype: torch.dtype, seed: int) -> None:
    *everyone, residual = _contributions(region, region.world + 1, (rows, width), dtype, seed)
    weight = torch.linspace(-1, 2, width).to(residual) if seed % 3 else None
    offset = float(seed % 2) if weight is not None else 0.0
    mine = everyone[region.rank].clone()
    if not region.fits_rows(mine):
        return
    normed, total = region.all_reduce_add_norm(mine, residual.clone(), weight, EPS, offset)
    facts = NormFacts("float64", width, EPS, offset, weight is not None)
    packed = {} if weight is None else {"weight": weight.double()}
    oracle, whole = AddRmsNormReference(facts).run(packed, torch.stack(everyone).double().sum(0), residual.double())
    _close(total, whole, f"total of {rows} rows")
    _close(normed, oracle, f"norm of {rows} rows")


def _taken(region: one_shot.Region) -> None:
    """What is left to others: sums so large that two steps pay, and of what the kernel does not read."""
    most = min(one_shot.PROGRAMS * one_shot.SHARE, one_shot.MOST_BYTES // (region.world - 1)) // 4
    x = torch.ones(most + 1, device=region.calls.device)
    expect(region.fits(x[:most]) and not region.fits(x), f"{most} float32 are the most")
    expect(not any(region.fits(other) for other in (x[:0], x[:9:2], x[:9].int(), x[:9].double())), "empty, apart or of no dtype")
    wide = x[: most // 9 * 9].view(9, -1)
    expect(region.fits(wide) and not region.fits_rows(wide), "rows wider than a program's share")


def _captured(region: one_shot.Region, width: int) -> None:
    """An odd number of calls of both kinds in a graph, replayed with other numbers."""
    x, residual = (torch.zeros(5, width, dtype=torch.bfloat16, device=region.calls.device) for _ in range(2))

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        for _ in range(2):
            region.all_reduce(x)
        return region.all_reduce_add_norm(x, residual, None, EPS)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, total = step()
    for turn in range(6):
        x.fill_(1 + turn)
        graph.replay()
        _close(total, torch.full_like(total, (1 + turn) * region.world**3).double(), f"replay {turn}")


def _released(region: one_shot.Region) -> None:
    """The last rank stays away; the others wait until they are let go, now and in the next calls."""
    if region.rank == region.world - 1:
        return
    timer = threading.Timer(0.5, lambda: _aside(region, region.release))
    timer.start()
    for _ in range(3):
        region.all_reduce(torch.ones(10, device=region.calls.device))
    if region.calls.is_cuda:
        torch.cuda.synchronize()
    timer.join()


def _aside(region: one_shot.Region, work: Callable[[], None]) -> None:
    if not region.calls.is_cuda:
        return work()
    with torch.cuda.device(region.calls.device), torch.cuda.stream(torch.cuda.Stream()):
        work()


def _close(got: torch.Tensor, oracle: torch.Tensor, what: str) -> None:
    error = float(((got.double() - oracle).abs() / (1 + oracle.abs())).max())
    expect(error <= BOUNDS[got.dtype], f"{what} in {got.dtype}: off by {error:.2g}")


def expect(holds: bool, what: str) -> None:
    if not holds:
        raise AssertionError(what)


if __name__ == "__main__":
    sys.exit(main())
