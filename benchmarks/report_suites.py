"""The suites that judge a device: conformance, recorded answers of tiny checkpoints, and two devices as one."""

from __future__ import annotations

import argparse
from typing import Any

import device_check


def conformance(options: argparse.Namespace) -> dict[str, Any]:
    """All conformance levels in one report, beside the results as Markdown and JUnit."""
    return device_check.conformance(options)


def parity(options: argparse.Namespace) -> dict[str, Any]:
    """Tiny checkpoints against the oracle's recorded answers."""
    return device_check.parity(options)


def ranks(options: argparse.Namespace) -> dict[str, Any]:
    """Two devices as one: W1 and W3 of the large shape with each layer split over both."""
    from gpu_workloads import load_workloads
    from report_shapes import SHAPES, engine

    if options.bench is None:
        raise ValueError("--bench names the folder with workloads.py; this part needs it")
    workloads = load_workloads(options.bench)
    spec = workloads.load_spec(options.bench / "workloads.json")
    found: dict[str, Any] = {}
    with engine(options, options.start_shape, max_num_batched_tokens=8192, tensor_parallel_size=2) as running:
        running.settle()
        source = workloads.PromptSource(max(SHAPES[options.start_shape]["vocab_size"], 2000), spec["seed"])
        running.generate(source.batch(8, 128), 8)
        for name in ("W1", "W3"):
            entry = workloads.workload(spec, name, "llama-3.1-8b-bf16")
            found[name] = workloads.MEASURE[entry["kind"]](
                running.generate, source, entry, lambda line, name=name: print(name, line, flush=True)
            )
    return {"ok": True, **found}
