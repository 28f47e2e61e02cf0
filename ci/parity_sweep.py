"""Compares every checkpoint of a folder with its recorded answers and writes docs/parity/results.json; one process, one after another.

    python ci/parity_sweep.py DIR [--device cpu] [--tp 1,2]

DIR holds a folder a checkpoint, as the parity oracle makes them; those of embed, classify, reward, seq2seq and
vlm are named with that folder.
A number of ranks that does not divide a model is left out; what the file
says of other checkpoints, and of numbers of ranks that were not asked for, stays.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from pagoda.hal.device import Backend
from pagoda.hal.discovery import choose
from pagoda.hal.errors import ConfigError, ModelError
from pagoda.models.load import describe, open_checkpoint, support_of
from pagoda.models.parallel.shard import Shard
from pagoda.serving.cli.parity_run import REFERENCE, Report, check

ROOT = Path(__file__).resolve().parent.parent
NAMED = ("embed", "classify", "reward", "seq2seq", "vlm")
TARGET = ROOT / "docs/parity/results.json"


def sweep(folder: Path, backend: Backend, ranks: list[int], old: dict[str, Any]) -> dict[str, Any]:
    """The document: where it ran, and a record for each checkpoint. `old`: the document before."""
    kept = {record["name"]: [run for run in record["runs"] if run["tp"] not in ranks] for record in old.get("checkpoints", ())}
    paths = [path for path in sorted(folder.iterdir()) if (path / "config.json").is_file() and (path / REFERENCE).is_file()]
    records = [_record(path, backend, ranks, kept.get(_name(path), [])) for path in paths]
    met = {record["name"] for record in records}
    others = [record for record in old.get("checkpoints", ()) if record["name"] not in met]
    return {
        "made": f"{datetime.now(UTC):%Y-%m-%d}",
        "device": backend.name,
        "machine": platform.machine(),
        "torch": torch.__version__,
        "checkpoints": sorted((*others, *records), key=lambda record: record["name"]),
    }


def _name(path: Path) -> str:
    return f"{path.parent.name}/{path.name}" if path.parent.name in NAMED else path.name


def _record(path: Path, backend: Backend, ranks: list[int], kept: list[dict[str, Any]]) -> dict[str, Any]:
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    head = {"name": _name(path), "architecture": config["architectures"][0], "model_type": config["model_type"]}
    support = support_of(config)
    if support == "unsupported":
        return {**head, "runs": [{"tp": 1, "passed": False, "worst": None, "error": _refusal(config)}]}
    runs = [*kept, *(_run(path, backend, tp) for tp in ranks if _divides(path, tp))]
    runs = [run for run in runs if run["tp"] == 1 or not run.get("error", "").startswith("ConfigError")]
    return {**head, **({"support": "bridge"} if support == "bridge" else {}), "runs": sorted(runs, key=lambda run: run["tp"])}


def _refusal(config: dict[str, Any]) -> str:
    """Why neither a family nor the bridge runs a model; the families that there are do not matter."""
    try:
        describe(config)
    except ModelError as error:
        return f"ModelError: {str(error).rpartition('nor can transformers run it: ')[2]}"
    raise AssertionError("it was unsupported")


def _divides(path: Path, tp: int) -> bool:
    try:
        describe(open_checkpoint(path), dtype="float32", shard=Shard(tp - 1, tp))
    except ConfigError:
        return False
    except Exception:
        return tp == 1  # the comparison itself tells what is wrong
    return True


def _run(path: Path, backend: Backend, tp: int) -> dict[str, Any]:
    try:
        report = check(path, backend, tp)
    except Exception as error:  # one checkpoint must not end the sweep
        report = Report(path.name, error=f"{type(error).__name__}: {error}")
    worst = max((finding.error for finding in report.findings), default=None)
    print("pass" if report.passed else "FAIL", path.name, f"tp {tp}", report.error[:300], flush=True)
    failed = {"error": report.error.replace(str(path), path.name)} if report.error else {}
    return {"tp": tp, "passed": report.passed, "worst": worst and float(f"{worst:.1e}"), **failed}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tp", default="1,2", help="numbers of ranks, with commas")
    asked = parser.parse_args(arguments)
    old = json.loads(TARGET.read_text(encoding="utf-8")) if TARGET.exists() else {}
    document = sweep(asked.folder, choose(asked.device).backend, [int(tp) for tp in asked.tp.split(",")], old)
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    TARGET.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0 if all(run["passed"] for checkpoint in document["checkpoints"] for run in checkpoint["runs"]) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
