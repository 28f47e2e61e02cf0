"""Where a decode step's time goes: `python benchmarks/gpu_profile.py --bench DIR --model NAME --batches 1,8,256`.

For each batch it prints kernels by time, the device's idle share between them, and milliseconds a step with and without the profiler;
with `--prefill 8x4096`, the same of that many prompts of that length with a token each, for every 8,192 tokens.
DIR and NAME as in `gpu_workloads.py`. Writes the same as JSON.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from gpu_workloads import DummyEngine, load_spec
from torch.profiler import ProfilerActivity, profile

TEMPLATE = re.compile(r"<.*>|\(.*\)")


def kernels_of(trace: Path) -> list[tuple[float, float, str]]:
    """Start and length in µs, and name, of everything that ran on the device, in order."""
    kinds = {"kernel", "gpu_memcpy", "gpu_memset"}
    events = json.loads(trace.read_text())["traceEvents"]
    return sorted((event["ts"], event["dur"], event["name"]) for event in events if event.get("cat") in kinds)


def summary(kernels: list[tuple[float, float, str]], steps: int) -> dict[str, Any]:
    """Per step: kernels, busy and idle µs, and each kernel's count and time. A processor of the host's own shows none."""
    if not kernels:
        return {"busy_us": 0.0, "kernels": []}
    total: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    busy, end = 0.0, kernels[0][0]
    for start, length, name in kernels:
        busy += max(0.0, start + length - max(end, start))
        end = max(end, start + length)
        entry = total[TEMPLATE.sub("", name)[:90]]
        entry[0] += 1
        entry[1] += length
    span = end - kernels[0][0]
    rows = sorted(((name, count / steps, spent / steps) for name, (count, spent) in total.items()), key=lambda row: -row[2])
    return {
        "kernels_a_step": len(kernels) / steps, "busy_us": busy / steps, "span_us": span / steps, "idle_share": 1 - busy / span,
        "kernels": [{"name": name, "count": count, "us": spent} for name, count, spent in rows[:40]],
    }  # fmt: skip


def measure(engine: DummyEngine, prompts: list[list[int]], steps: int) -> dict[str, Any]:
    """A decode of `steps` steps, timed, then traced."""
    engine.generate(prompts, steps)
    began = time.perf_counter()
    engine.generate(prompts, 1)
    first = time.perf_counter() - began
    began = time.perf_counter()
    engine.generate(prompts, steps + 1)
    step_ms = 1e3 * (time.perf_counter() - began - first) / steps
    kernels, seconds = traced(engine, prompts, steps + 1)
    traced_ms = 1e3 * (seconds - first) / steps
    # The prompt's part is left out: from the end of the first tenth of the kernels on.
    found = summary(kernels[len(kernels) // 10 :], round(0.9 * steps))
    # Tracing slows the host, not the kernels: what they do not fill of an untraced step is the share that counts.
    idle = max(0.0, 1 - found["busy_us"] / (1e3 * step_ms))
    return {"step_ms": step_ms, "traced_step_ms": traced_ms, "untraced_idle_share": idle, **found}


def measure_prefill(engine: DummyEngine, prompts: list[list[list[int]]]) -> dict[str, Any]:
    """Three draws of prompts with one token each: a first time, timed, traced. Steps are of 8,192 tokens."""
    engine.generate(prompts[0], 1)
    began = time.perf_counter()
    engine.generate(prompts[1], 1)
    seconds = time.perf_counter() - began
    steps = sum(map(len, prompts[1])) / 8192
    return {"step_ms": 1e3 * seconds / steps, **summary(traced(engine, prompts[2], 1)[0], steps)}


def traced(engine: DummyEngine, prompts: list[list[int]], tokens: int) -> tuple[list[tuple[float, float, str]], float]:
    """The device's kernels, and the seconds that it took."""
    # Without a device, the host's own work is watched, which is none of a device's.
    seen = ProfilerActivity.CUDA if torch.cuda.is_available() else ProfilerActivity.CPU
    with profile(activities=[seen]) as tracer:
        began = time.perf_counter()
        engine.generate(prompts, tokens)
        seconds = time.perf_counter() - began
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        tracer.export_chrome_trace(str(path))
        return kernels_of(path), seconds


def show(batch: int | str, found: dict[str, Any]) -> None:
    head = {name: round(value, 3) for name, value in found.items() if name != "kernels"}
    print(f"batch {batch}: {head}", flush=True)
    for row in found["kernels"][:24]:
        print(f"  {row['us']:9.1f} µs  {row['count']:7.1f} ×  {row['us'] / row['count']:7.2f}  {row['name']}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bench", type=Path, required=True)
    parser.add_argument("--model", default="qwen3-0.6b-bf16")
    parser.add_argument("--batches", default="1,8,256")
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--prefill", help="such as 8x4096: that many prompts of that length, beside the batches")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--kernel", action="append", default=[], metavar="OP=NAME", help="as the server's; repeatable")
    parser.add_argument("--out", type=Path, default=Path("gpu-profile.json"))
    options = parser.parse_args()
    workloads, spec, name = load_spec(options.bench, options.model)
    model = spec["models"][name]
    config = workloads.model_config(spec, name)
    source = workloads.PromptSource(config["vocab_size"], spec["seed"])
    settings = {"device": options.device, "dtype": model["dtype"], "quantization": model["quantization"], **spec["engine"]}
    settings["kernel"] = dict(one.split("=") for one in options.kernel)
    result: dict[str, Any] = {
        "model": name,
        "kernel": settings["kernel"],
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "batches": {},
    }
    with DummyEngine(config, max_num_batched_tokens=8192, **settings) as engine:
        result["device"] = engine.facts.device
        for batch in map(int, filter(None, options.batches.split(","))):
            found = result["batches"][batch] = measure(engine, source.batch(batch, options.prompt), options.steps)
            show(batch, found)
            options.out.write_text(json.dumps(result, indent=1))
        if options.prefill:
            count, length = map(int, options.prefill.split("x"))
            found = result["prefill"] = measure_prefill(engine, [source.batch(count, length) for _ in range(3)])
            show(options.prefill, found)
            options.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
