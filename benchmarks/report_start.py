"""From the start of a process to its first token, with nothing compiled before and with all of it, and to the last capture, which comes
after it; sleep and wake with bytes and times."""

from __future__ import annotations

import argparse
import cProfile
import io
import json
import os
import pstats
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

GOALS = {"cold": 60.0, "cached": 20.0, "built": 20.0}
HERE = Path(__file__).resolve().parent


def start(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds to the first token: nothing compiled (goal 60), all compiled (20), after a build ahead (20), and a profile of a start."""
    with tempfile.TemporaryDirectory() as fresh, tempfile.TemporaryDirectory() as built:
        kept = options.kernels or fresh
        folders = {"cold": kept, "cached": kept, "profile": kept, "build": built, "built": built}
        found: dict[str, Any] = {}
        for name in options.starts.split(","):
            found[name] = _child(options, name, folders[name])
            print(f"{name}: { ({k: v for k, v in found[name].items() if k != 'profile'}) }", flush=True)
            Path(options.out, f"start-{name}.json").write_text(json.dumps(found[name], indent=1))
    ok = all(found[name].get("first_token", 1e9) <= goal for name, goal in GOALS.items() if name in found)
    return {"ok": ok, "goals": GOALS, **found}


def _child(options: argparse.Namespace, name: str, folder: str) -> dict[str, Any]:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_CACHE_DIR"} | {"XDG_CACHE_HOME": folder}
    command = [sys.executable, str(HERE / "report_start.py"), name, options.device, options.start_shape]
    began = time.time()
    ended = subprocess.run([*command, str(began)], env=environment, capture_output=True, text=True, timeout=280)
    if ended.returncode:
        return {"error": ended.stderr[-3000:]}
    result: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return result


def _one(name: str, device: str, shape: str, began: float) -> dict[str, Any]:
    """In a process of its own."""
    import torch  # timed
    from pagoda.hal.comm import Topology
    from pagoda.ops.kernel_store import default_root
    from pagoda.serving.cli.kernels_build import build_for
    from pagoda.serving.engine.build import build_runner
    from pagoda.serving.engine.config import EngineConfig
    from report_shapes import LONGEST, SHAPES, engine

    found: dict[str, Any] = {"torch": torch.__version__, "imports": time.time() - began}
    settings = {"dtype": "bfloat16", "max_model_len": LONGEST[shape], "max_num_seqs": 256, "max_num_batched_tokens": 8192}
    if name in ("build", "profile"):
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(SHAPES[shape]))
            config = EngineConfig(model=folder, device=device, load_format="dummy", use_tqdm_on_load=False, **settings)  # type: ignore[arg-type]
            if name == "build":
                entry = build_for(config, default_root(), None)
                return {**found, "built": time.time() - began, "kernels": entry.kernels, "bytes": entry.nbytes}
            return {**found, "profile": _profiled(lambda: build_runner(config, Topology(0, 1)).close())}
    with engine(argparse.Namespace(device=device, shape=shape), max_num_batched_tokens=8192) as running:
        found |= {"ready": time.time() - began, **running.facts.load_seconds}
        running.generate([[5, 6, 7, 8]], 1)
        found["first_token"] = time.time() - began
        first = running.captured()
        ready = time.time()
        running.generate([list(range(20, 120))] * 20, 8)
        found["twenty_more"] = time.time() - ready
        captured = running.settle()
        return {**found, "captured_first": first, "captured_later": captured - first, "last_capture": time.time() - began}


def _profiled(work: Any) -> list[str]:
    profiler = cProfile.Profile()
    profiler.enable()
    work()
    profiler.disable()
    lines: list[str] = []
    for order in ("cumulative", "tottime"):
        text = io.StringIO()
        pstats.Stats(profiler, stream=text).sort_stats(order).print_stats(70)
        lines += [line[:170] for line in text.getvalue().splitlines() if line.strip()]
    return lines


def sleep(options: argparse.Namespace) -> dict[str, Any]:
    """Sleep and wake at both levels: bytes that are given back, seconds, and the same answer afterwards."""
    from report_load import memory
    from report_shapes import engine

    prompt = list(range(20, 90))
    with engine(options, max_num_batched_tokens=2048) as running:
        running.settle()  # a step as it is may turn a greedy token of one that is captured
        running.generate([prompt], 1)
        before = running.tokens([prompt], 16, temperature=0)  # behind its own pages, as after each wake
        rows = []
        for level in (1, 2):
            awake = memory()
            seconds = _timed(running.run, running.client.call("sleep", level=level))
            asleep = memory()
            woken = _timed(running.run, running.client.call("wake"))
            first = _timed(running.generate, [prompt], 1)
            running.settle()
            same = running.tokens([prompt], 16, temperature=0) == before
            given = awake[1] - asleep[1]
            rows.append({"level": level, "sleep_s": seconds, "wake_s": woken, "first_token_s": first, "same": same, "given_back": given,
                         "awake": awake, "asleep": asleep, "after": memory()})  # fmt: skip
            print(rows[-1], flush=True)
    return {"ok": all(row["same"] for row in rows), "levels": rows}


def _timed(work: Any, *given: Any) -> float:
    began = time.perf_counter()
    work(*given)
    return time.perf_counter() - began


if __name__ == "__main__":
    print(json.dumps(_one(sys.argv[1], sys.argv[2], sys.argv[3], float(sys.argv[4]))))
