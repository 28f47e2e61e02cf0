"""Ways to launch the recurrences' kernels, right or wrong, and µs: `python benchmarks/gpu_state_variants.py [--only …]`.

A process measures the ways of a choice one after the other, alone on the device; where a program that a compiler spoiled ends it, another
goes on with the next. Others compile for all of them first. The first way of a choice is the one that is taken: of it, µs of each of its
kernels, too. `--device cpu` checks the script in Triton's interpreter.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from gpu_states import SMALL, USES, batch_of, measure
from pagoda.hal.discovery import find
from pagoda.ops.triton.absent import standing_in
from pagoda.ops.triton.conv import CausalConv, Tile
from pagoda.ops.triton.delta import GatedDelta
from pagoda.ops.triton.delta_chunks import WAYS
from pagoda.ops.triton.ssd import SsdScan
from pagoda.ops.triton.ssd_segments import WAYS as SSD_WAYS

RIGHT = 0.01
"""The largest error in bfloat16 that is rounding."""
HELPERS = 14


class Choice(NamedTuple):
    """What is chosen: an attribute of a kernel, its values, and the requests and their tokens that are measured."""

    use: str
    kind: type[Any]
    attribute: str
    values: tuple[Any, ...]
    steps: tuple[tuple[int, int], ...]


PROMPT = ((1, 8192),)
CHOICES = {
    "delta": Choice("gated_delta_rule", GatedDelta, "way", WAYS, PROMPT),
    "ssd": Choice("ssd_scan", SsdScan, "way", SSD_WAYS, PROMPT),
    "prompt": Choice(
        "causal_conv1d", CausalConv, "prompt", (Tile(512, 4, 32, 8), Tile(1024, 4, 32, 8), Tile(512, 4, 64, 8), Tile(512, 4, 32, 4)), PROMPT
    ),
    "many": Choice("causal_conv1d", CausalConv, "many", (Tile(1024, 4), Tile(512, 2), Tile(512, 4)), ((32, 1), (256, 1))),
    "one": Choice("causal_conv1d", CausalConv, "one", (Tile(256, 1), Tile(256, 4), Tile(512, 2)), ((1, 1),)),
    "channels": Choice("gated_delta_rule by channel", GatedDelta, "way", WAYS[:3], PROMPT),
}


@contextmanager
def turn(lock: Path) -> Iterator[None]:
    """Within, no other process uses the device."""
    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def compile_some(names: list[str], part: int, of: int) -> None:
    """Every `of`-th way, into Triton's cache."""
    ways = [(CHOICES[name], value) for name in names for value in CHOICES[name].values]
    with standing_in(find("cuda").describe("h200")):
        for choice, value in ways[part::of]:
            setattr(choice.kind, choice.attribute, value)
            use, device = USES[choice.use](), torch.device("meta")
            kernel = use.kinds[0](use.facts)
            packed = [kernel.pack(use.weights(device, torch.bfloat16))] if use.weights else []
            for rows, queries in choice.steps:
                dtype = torch.bfloat16 if use.state_dtype == "bfloat16" else torch.float32
                pages = use.view(torch.empty(1 + rows, *use.state, dtype=dtype, device=device))
                kernel.run(*packed, *use.inputs(rows * queries, device, torch.bfloat16), pages, batch_of(rows, queries, 1, device))


def run_some(name: str, first: int, lock: Path, device: torch.device) -> None:
    """Ways from the first-th on, in this process; prints a line of JSON for each step."""
    choice, real = CHOICES[name], device.type == "cuda"
    dtype = torch.bfloat16 if real else torch.float16
    for index, value in enumerate(choice.values[first:], first):
        setattr(choice.kind, choice.attribute, value)
        for rows, queries in choice.steps:
            with turn(lock):
                found = measure(
                    (USES if real else SMALL)[choice.use](), rows, queries if real else min(queries, 130), device, dtype, index == 0
                )
            print(json.dumps({"way": index, "step": f"{rows} × {queries}", **found}), flush=True)


def told(name: str, said: str) -> int:
    """Print what a process said; the number of the last way that it measured, −1 where there is none."""
    last = -1
    for line in said.splitlines():
        found = json.loads(line)
        last = found["way"]
        word = "right" if found["error"] < RIGHT else "WRONG"
        took = f"{found['us']:.1f} µs {found.get('parts', '')}" if "us" in found else "not measured"
        print(f"{name} {tuple(CHOICES[name].values[last])} {found['step']}: {word} ({found['error']:.4f}), {took}", flush=True)
    return last


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(CHOICES))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=int, default=80, help="after which what is not measured is given up")
    parser.add_argument("--compile", type=int, help="compile this part of the ways, and nothing else")
    parser.add_argument("--some", help="NAME,FIRST,LOCK: these ways, in this process")
    options = parser.parse_args()
    names = options.only.split(",")
    if options.compile is not None:
        compile_some(names, options.compile, HELPERS)
    elif options.some:
        name, first, lock = options.some.split(",")
        run_some(name, int(first), Path(lock), torch.device(options.device))
    else:
        compare(names, options.device, time.monotonic() + options.seconds)


def compare(names: list[str], device: str, ends: float) -> None:
    """Each choice in a process that begins at once and waits for its turn."""
    asked = [sys.executable, __file__, "--device", device]
    if device == "cuda":
        helpers = [subprocess.Popen([*asked, "--only", ",".join(names), "--compile", str(part)]) for part in range(HELPERS)]
        print("helpers that failed:", sum(helper.wait() != 0 for helper in helpers), flush=True)
    with tempfile.TemporaryDirectory() as folder:

        def begin(name: str, first: int) -> subprocess.Popen[str]:
            some = [*asked, "--some", f"{name},{first},{folder}/lock"]
            return subprocess.Popen(some, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

        waiting = [(name, 0, begin(name, 0)) for name in names]
        while waiting:
            name, first, process = waiting.pop(0)
            late = False
            try:
                said, complaint = process.communicate(timeout=max(1.0, ends - time.monotonic()))
            except subprocess.TimeoutExpired:
                late = True
                process.kill()
                said, complaint = process.communicate()
            last = max(told(name, said), first - 1)
            if late:
                print(f"{name}: out of time", flush=True)
            elif process.returncode:
                values = CHOICES[name].values
                why = (complaint.strip().splitlines() or ["it ended"])[-1][:200]
                print(f"{name} {tuple(values[min(last + 1, len(values) - 1)])}: FAILED: {why}", flush=True)
                if last + 2 < len(values):
                    waiting.append((name, last + 2, begin(name, last + 2)))


if __name__ == "__main__":
    main()
