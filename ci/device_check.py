"""Right before fast, on any device: `python ci/device_check.py --device cuda --out DIR [--parity DIR] [--steps kernels,parity,shape]`.

Needs neither an install nor the server's packages. Steps: `kernels` checks every registered kernel against its float64 oracle,
`replays` what is captured of them, `parity` runs checkpoints with recorded reference outputs, `shape` runs a dummy 0.6 B model in this
process, `conformance` all its levels. Writes device-check.json under --out and exits non-zero when something is red.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "ci"))

from link import link  # noqa: E402

if TYPE_CHECKING:
    from pagoda.serving.conformance.report import Report, Result

Step = Callable[[argparse.Namespace], dict[str, Any]]


def main() -> int:
    options = _options()
    site = Path(tempfile.mkdtemp())
    link(site)
    sys.path.insert(0, str(site))
    results: dict[str, Any] = {"machine": _machine(), "steps": {}}
    for name in options.steps.split(","):
        print(f"== {name}", flush=True)
        start = time.perf_counter()
        try:
            result = STEPS[name](options)
        except Exception:
            traceback.print_exc()
            result = {"ok": False, "error": traceback.format_exc()}
        results["steps"][name] = {**result, "seconds": round(time.perf_counter() - start, 1)}
        print(f"── {name}: {'ok' if result['ok'] else 'FAILED'} in {results['steps'][name]['seconds']} s", flush=True)
        Path(options.out).mkdir(parents=True, exist_ok=True)
        (Path(options.out) / "device-check.json").write_text(json.dumps(results, indent=1))
    return 0 if all(step["ok"] for step in results["steps"].values()) else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", default="device-check")
    parser.add_argument("--parity", help="folder of checkpoints with reference.safetensors, or one of them")
    parser.add_argument("--dtypes", default="float32,bfloat16", help="of parity")
    parser.add_argument("--levels", default="0,1,2,3,4,5", help="of conformance")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes that share conformance, or parity")
    parser.add_argument("--limit", type=float, default=570, help="seconds of conformance; what has not ended then is listed as not shown")
    parser.add_argument("--steps", default="kernels,parity,shape")
    parser.add_argument("--only", default="", help="of kernels and replays: those whose OP=NAME has this word")
    return parser.parse_args()


def _machine() -> dict[str, str]:
    import torch

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor()
    return {"python": platform.python_version(), "torch": torch.__version__, "device": name, "date": time.strftime("%Y-%m-%d")}


def kernels(options: argparse.Namespace) -> dict[str, Any]:
    from pagoda.hal.discovery import choose
    from pagoda.ops.check import check_kernel
    from pagoda.ops.registry import ALL_OPS
    from pagoda.ops.table import candidates

    warnings.simplefilter("ignore")
    backend = choose(options.device).backend
    device = backend.open(0)
    rows = []
    for kernel in candidates(backend):
        if options.only not in f"{kernel.op}={kernel.name}":
            continue
        op = ALL_OPS[kernel.op]
        for dtype in sorted(set(op.dtypes) & set(kernel.needs.dtypes or op.dtypes) & device.info.dtypes):
            report = check_kernel(kernel, op, dtype=dtype, device=device.torch_device, info=device.info)
            print(report, flush=True)
            rows.append({"op": report.op, "kernel": report.kernel, "dtype": dtype, "ran": report.ran, "worst": report.worst,
                         "failures": [list(failure) for failure in report.failures]})  # fmt: skip
    return {"ok": any(row["ran"] for row in rows) and not any(row["failures"] for row in rows), "kernels": rows}


def replays(options: argparse.Namespace) -> dict[str, Any]:
    """Kernels that can be captured: their replays, planned again for the step they serve, against runs."""
    from pagoda.hal.discovery import choose
    from pagoda.ops.check_replay import check_replay
    from pagoda.ops.registry import ALL_OPS
    from pagoda.ops.table import candidates

    warnings.simplefilter("ignore")
    backend = choose(options.device).backend
    device = backend.open(0)
    where: dict[str, Any] = {"device": device.torch_device, "info": device.info}
    rows = []
    for kernel in candidates(backend):
        op = ALL_OPS[kernel.op]
        if options.only not in f"{kernel.op}={kernel.name}" or "capturable" not in kernel.claims:
            continue
        for dtype in sorted(set(op.dtypes) & set(kernel.needs.dtypes or op.dtypes) & device.info.dtypes):
            report = check_replay(kernel, op, device.graphs.capture, dtype=dtype, **where)
            print(report, flush=True)
            found = {"ran": report.ran, "failures": list(map(list, report.failures))}
            rows.append({"kernel": f"{op.name}={kernel.name}", "dtype": dtype, **found})
    return {"ok": any(row["ran"] for row in rows) and not any(row["failures"] for row in rows), "replays": rows}


def parity(options: argparse.Namespace) -> dict[str, Any]:
    """Of each checkpoint below a folder, or of one; more than one are shared by processes, one each, so that a fault spoils no other."""
    where = Path(options.parity)
    paths = [where] if (where / "config.json").exists() else sorted(one for one in where.iterdir() if one.is_dir())
    asked = [(path, dtype) for dtype in options.dtypes.split(",") for path in paths]
    compare = _compared_apart if options.jobs > 1 and len(asked) > 1 else _compared
    rows = list[dict[str, Any]]()
    with ThreadPoolExecutor(options.jobs if compare is _compared_apart else 1) as pool:
        for row in pool.map(lambda one: compare(*one, options.device), asked):
            rows.append(row)
            print(row["dtype"], row["line"], flush=True)
    return {"ok": bool(rows) and all(row["passed"] for row in rows), "checkpoints": rows}


def _compared(path: Path, dtype: str, device: str) -> dict[str, Any]:
    from pagoda.hal.discovery import choose
    from pagoda.serving.cli.parity_run import check

    report = check(path, choose(device).backend, dtype=dtype)
    return {"checkpoint": path.name, "dtype": dtype, "passed": report.passed, "line": str(report).replace(str(path), path.name)}


def _compared_apart(path: Path, dtype: str, device: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as out:
        command = [
            sys.executable,
            __file__,
            "--device",
            device,
            "--steps",
            "parity",
            "--parity",
            str(path),
            "--dtypes",
            dtype,
            "--out",
            out,
        ]
        ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        found = Path(out, "device-check.json")
        rows = json.loads(found.read_text())["steps"]["parity"].get("checkpoints") if found.exists() else None
    if rows:
        return dict(rows[0])
    last = (ended.stdout.strip().splitlines() or [""])[-1]
    return {"checkpoint": path.name, "dtype": dtype, "passed": False, "line": f"FAIL {path.name}: it ended with {ended.returncode}: {last}"}


def shape(options: argparse.Namespace) -> dict[str, Any]:
    """A 0.6 B model with dummy weights: greedy tokens do not depend on the company that a request runs in."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from gpu_workloads import DummyEngine

    draw = random.Random(0)
    prompts = [draw.choices(range(10, SHAPE["vocab_size"]), k=length) for length in (5, 64, 300, 33)]
    start = time.perf_counter()
    with DummyEngine(SHAPE, device=options.device, dtype="float32", max_model_len=1024, kv_cache_memory_bytes=1 << 30) as engine:
        loaded = time.perf_counter() - start
        alone = [engine.leads(prompt, 24) for prompt in prompts]
        parted = [_parted(*one, tokens) for one, tokens in zip(alone, engine.tokens(prompts, 24, temperature=0), strict=True)]
        start = time.perf_counter()
        counts = engine.generate(prompts * 8, 64)
        rate = sum(counts) / (time.perf_counter() - start)
        kernels = engine.facts.kernels
    print(f"loaded in {loaded:.1f} s, {rate:.0f} tok/s with 32 requests; parted: {parted}; {kernels}", flush=True)
    ok = all(part is None or part["lead"] < TIE for part in parted) and counts == [64] * 32
    return {"ok": ok, "start_s": loaded, "tok_s": rate, "parted": parted, "kernels": kernels}


TIE = 1e-3
"""Nats; a token whose lead is smaller may turn with the order of additions."""


def _parted(alone: list[int], leads: list[float], together: list[int]) -> dict[str, float] | None:
    """Where the two first differ, and the lead of the token there."""
    place = next((i for i, (a, b) in enumerate(zip(alone, together, strict=True)) if a != b), None)
    return None if place is None else {"token": place, "lead": leads[place]}


SHAPE = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072,
    "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "hidden_act": "silu",
    "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000, "attention_bias": False, "tie_word_embeddings": True,
}  # fmt: skip


def conformance(options: argparse.Namespace) -> dict[str, Any]:
    """The whole conformance suite; its report lies beside the results as Markdown and JUnit."""
    from pagoda.serving.conformance.runner import run_levels

    folder = Path(options.out)
    folder.mkdir(parents=True, exist_ok=True)

    def keep(report: Report) -> None:
        """After each result, so that a run which is cut short leaves what it found."""
        (folder / "conformance.md").write_text(report.to_markdown())
        (folder / "conformance.json").write_text(report.to_json())
        (folder / "conformance.xml").write_text(report.to_junit())

    levels = tuple(map(int, options.levels.split(",")))
    report = run_levels(options.device, levels, _say, jobs=options.jobs, limit_s=options.limit, keep=keep)
    return {"ok": report.passed(), "levels": {level: report.passed(level) for level in report.levels}}


def _say(found: Result) -> None:
    print(found.outcome.value, found.level, found.name, f"{found.seconds:.1f} s", found.detail[:600], flush=True)


STEPS: dict[str, Step] = {"kernels": kernels, "replays": replays, "parity": parity, "shape": shape, "conformance": conformance}

if __name__ == "__main__":
    sys.exit(main())
