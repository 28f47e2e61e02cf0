"""What a device has to show beside its speed, part by part: `python benchmarks/gpu_report.py --device cuda --parts load,start --out DIR`.

Each part is guarded and its result written to gpu-report.json under --out when it ends; parts that are in there already are left out
unless --again is given, so that a run that was cut short goes on where it stopped. `--parts all` takes every one that fits the machine;
`--list` says what they are. With `--shape tiny` a laptop's CPU runs all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "ci"), str(ROOT / "benchmarks")]

import report_exact  # noqa: E402
import report_fixed  # noqa: E402
import report_idle  # noqa: E402
import report_load  # noqa: E402
import report_start  # noqa: E402
import report_suites  # noqa: E402
import torch  # noqa: E402

Part = Callable[[argparse.Namespace], dict[str, Any]]

PARTS: dict[str, Part] = {
    "fixed": report_fixed.kernels,
    "invariance": report_load.invariance,
    "load": report_load.load,
    "idle": report_idle.idle,
    "sampling": report_exact.sampling,
    "sleep": report_start.sleep,
    "start": report_start.start,
    "conformance": report_suites.conformance,
    "parity": report_suites.parity,
    "ranks": report_suites.ranks,
}


def main() -> int:
    options = _options()
    if options.list:
        for name, part in PARTS.items():
            print(f"{name:12} {(part.__doc__ or '').strip().splitlines()[0]}")
        return 0
    path = Path(options.out) / "gpu-report.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"parts": {}}
    results["machine"] = _machine()
    names = list(PARTS) if options.parts == "all" else options.parts.split(",")
    for name in names:
        if name in results["parts"] and not options.again:
            continue
        print(f"== {name}", flush=True)
        began = time.perf_counter()
        try:
            found = PARTS[name](options)
        except Exception:
            traceback.print_exc()
            found = {"ok": False, "error": traceback.format_exc()}
        results["parts"][name] = {**found, "seconds": round(time.perf_counter() - began, 1), "shape": options.shape}
        print(f"── {name}: {'ok' if found['ok'] else 'FAILED'} in {results['parts'][name]['seconds']} s", flush=True)
        path.write_text(json.dumps(results, indent=1))
    return 0 if all(results["parts"][name]["ok"] for name in names) else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", default="gpu-report")
    parser.add_argument("--parts", default="all", help="with commas between")
    parser.add_argument("--again", action="store_true", help="run parts whose results are there")
    parser.add_argument("--list", action="store_true", help="say what the parts are")
    parser.add_argument("--shape", default="0.6b", choices=("tiny", "0.6b", "8b"))
    parser.add_argument("--start-shape", default="8b", choices=("tiny", "0.6b", "8b"), help="of the parts start and ranks")
    parser.add_argument("--requests", type=int, default=2000, help="of the part load")
    parser.add_argument("--draws", type=int, default=20_000, help="of the part sampling, for each filter")
    parser.add_argument("--starts", default="cold,cached,profile,build,built", help="of the part start, in this order")
    parser.add_argument("--kernels", help="folder for compiled kernels of the part start; a new one by default")
    parser.add_argument("--parity", help="folder of checkpoints with reference.safetensors")
    parser.add_argument("--dtypes", default="float32,bfloat16", help="of the part parity")
    parser.add_argument("--levels", default="0,1,2,3,4,5", help="of the part conformance")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="processes of the part conformance that check kernels at once"
    )
    parser.add_argument("--limit", type=float, default=570, help="seconds of the part conformance")
    parser.add_argument("--bench", type=Path, help="folder with workloads.py, for the part ranks")
    return parser.parse_args()


def _machine() -> dict[str, str]:
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor()
    return {"python": platform.python_version(), "torch": torch.__version__, "device": name, "date": time.strftime("%Y-%m-%d")}


if __name__ == "__main__":
    sys.exit(main())
