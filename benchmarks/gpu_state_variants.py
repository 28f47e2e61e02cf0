"""Ways to launch the recurrences' kernels, each in a process of its own: `python benchmarks/gpu_state_variants.py [--only …]`.

A program that a compiler spoils ends its process, not the comparison. They compile and check beside each other, and measure one at a time.
Prints for each whether it is right, µs a call and µs of each of its kernels; the first of a choice is the one that is taken.
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
from gpu_states import SMALL, USES, measure
from pagoda.ops.triton.conv import CausalConv, Tile
from pagoda.ops.triton.delta import GatedDelta
from pagoda.ops.triton.delta_chunks import WAYS

RIGHT = 0.01
"""The largest error in bfloat16 that is rounding."""


class Choice(NamedTuple):
    """What is chosen: an attribute of a kernel, its values, and the requests and their tokens that are measured."""

    use: str
    kind: type[Any]
    attribute: str
    values: tuple[Any, ...]
    steps: tuple[tuple[int, int], ...]


PROMPTS = ((1, 8192), (8, 1024))
CHOICES = {
    "delta": Choice("gated_delta_rule", GatedDelta, "way", WAYS, PROMPTS),
    "channels": Choice("gated_delta_rule by channel", GatedDelta, "way", WAYS[:4], PROMPTS[:1]),
    "prompt": Choice(
        "causal_conv1d", CausalConv, "prompt",
        (Tile(32, 256, 8), Tile(32, 128, 4), Tile(16, 256, 4), Tile(64, 128, 8), Tile(32, 512, 8), Tile(16, 512, 4)), PROMPTS,
    ),
    "many": Choice(
        "causal_conv1d", CausalConv, "many", (Tile(1, 1024, 4), Tile(1, 512, 2), Tile(1, 512, 4), Tile(1, 2048, 8)), ((32, 1), (256, 1))
    ),
    "one": Choice("causal_conv1d", CausalConv, "one", (Tile(1, 256, 1), Tile(1, 256, 4), Tile(1, 512, 2)), ((1, 1),)),
}  # fmt: skip


@contextmanager
def turn(lock: Path) -> Iterator[None]:
    """Within, no other process measures."""
    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def run_one(name: str, index: int, lock: Path, device: torch.device) -> None:
    """One way, in this process; prints a line of JSON for each step."""
    choice, real = CHOICES[name], device.type == "cuda"
    setattr(choice.kind, choice.attribute, choice.values[index])
    for rows, queries in choice.steps:
        use = (USES if real else SMALL)[choice.use]()
        found = measure(use, rows, queries if real else min(queries, 130), device, torch.bfloat16 if real else torch.float16, turn(lock))
        print(json.dumps({"step": f"{rows} × {queries}", **found}), flush=True)


def summary(said: str, failed: str) -> str:
    """What a process said, in a line; the last line of what it complained of where it failed."""
    parts = []
    for line in said.splitlines():
        found = json.loads(line)
        word = "right" if found["error"] < RIGHT else "WRONG"
        took = f"{found['us']:.1f} µs {found['parts']}" if "us" in found else "not measured"
        parts.append(f"{found['step']}: {word} ({found['error']:.4f}), {took}")
    return "; ".join([*parts, *([f"FAILED: {failed}"] if failed else [])])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(CHOICES))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=int, default=75, help="after which what is not measured is given up")
    parser.add_argument("--one", help="NAME,INDEX,LOCK: this way alone, in this process")
    options = parser.parse_args()
    if options.one:
        name, index, lock = options.one.split(",")
        run_one(name, int(index), Path(lock), torch.device(options.device))
        return
    with tempfile.TemporaryDirectory() as folder:
        begun = []
        for name in options.only.split(","):
            for index, value in enumerate(CHOICES[name].values):
                asked = [sys.executable, __file__, "--device", options.device, "--one", f"{name},{index},{folder}/lock"]
                begun.append((name, value, subprocess.Popen(asked, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)))
        ends = time.monotonic() + options.seconds
        for name, value, process in begun:
            try:
                said, complaint = process.communicate(timeout=max(1.0, ends - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                said, complaint = process.communicate()
                complaint += "\nit took too long"
            failed = (complaint.strip().splitlines() or ["it ended"])[-1][:200] if process.returncode else ""
            print(f"{name} {tuple(value)}: {summary(said, failed)}", flush=True)


if __name__ == "__main__":
    main()
