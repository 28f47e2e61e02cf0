"""Compares one model of each kind of block with its recorded answers on a device, a process each, and keeps a table of it.

    python ci/block_parity.py DIR --device tpu [--only WORD]

DIR holds checkpoints as `ci/block_table.py` wants them. Writes docs/parity/DEVICE.json and DEVICE.md after every checkpoint; `--check` says
whether the page is stale. With `--only`, the checkpoint of that name, or kinds whose name or checkpoint has WORD; what the file says
of others stays, and what it says nothing of has not been run.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from block_kinds import SECTIONS, Kind

FOLDER = Path(__file__).resolve().parent.parent / "docs/parity"
Result = dict[str, Any]

HEAD = """# Blocks compared on `{device}`

Made by `python ci/block_parity.py DIR --device {device}`; do not edit. One model of each kind of block, by `pagoda parity` against
transformers' recorded answers in float32: greedy tokens, their logits and log-probabilities, hidden states or scores. The figure is the
largest error in standard deviations of the reference.
"""


def compared(checkpoint: Path, device: str, limit: float) -> Result:
    """By a process of its own, which some runtimes need: they keep what they compiled."""
    command = [sys.executable, "-m", "pagoda.serving.cli.main", "parity", str(checkpoint), "--device", device, "--json"]
    try:
        ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, timeout=limit)
    except subprocess.TimeoutExpired:
        return {"passed": False, "error": f"it had not ended after {limit:.0f} s"}
    start = ended.stdout.find("[")
    if start < 0:
        return {"passed": False, "error": f"its process ended with {ended.returncode} before it could report"}
    (report,) = json.loads(ended.stdout[start:])
    findings = report["findings"]
    red = [f"{one['name']}: {one['note'] or 'off by {:.2g}'.format(one['error'])}" for one in findings if not one["passed"]]
    why = report["error"].replace(str(checkpoint), checkpoint.name) or "; ".join(red[:3])
    worst = float(f"{max((one['error'] for one in findings), default=0.0):.1e}")
    return {"passed": report["passed"], "worst": worst, "compared": len(findings), **({"error": why} if why else {})}


def page(record: dict[str, Any]) -> str:
    """The table of one device."""
    found = record["checkpoints"]
    kinds = [kind for kinds in SECTIONS.values() for kind in kinds]
    run, red = [kind for kind in kinds if kind.checkpoint in found], [name for name, one in found.items() if not one["passed"]]
    count = f"{len(run)} of {len(kinds)} kinds were run, {sum(kind.checkpoint not in red for kind in run)} agree"
    where = f"{record['driver']}, {record['machine']}, {record['made']}"
    lines = [HEAD.format(device=record["device"]), f"{count}; {where}."]
    for section, own in SECTIONS.items():
        lines += ["", f"## {section}", "", "| block | checkpoint | |", "| --- | --- | --- |"]
        lines += [f"| {kind.name} | `{kind.checkpoint}` | {_cell(kind, found)} |" for kind in own]
    return "\n".join(lines) + "\n"


def _cell(kind: Kind, found: dict[str, Result]) -> str:
    result = found.get(kind.checkpoint)
    if result is None:
        return "not run"
    return f"{result['worst']:.0e}" if result["passed"] else f"**red**: {' '.join(result['error'].split())}"


def _head(device: str) -> dict[str, str]:
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", *(["torch-xla"] if device == "tpu" else [])))
    return {"device": device, "driver": packages, "machine": platform.machine(), "made": f"{datetime.now(UTC):%Y-%m-%d}"}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--device", required=True)
    parser.add_argument("--only", action="append", help="a checkpoint, or kinds whose name or checkpoint has this word")
    parser.add_argument("--limit", type=float, default=1800, help="seconds for one checkpoint")
    parser.add_argument("--check", action="store_true")
    asked = parser.parse_args(arguments)
    file = FOLDER / f"{asked.device}.json"
    record: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {"checkpoints": {}}
    if asked.check:
        return 0 if file.with_suffix(".md").read_text(encoding="utf-8") == page(record) else 1
    kinds = [kind for kinds in SECTIONS.values() for kind in kinds]
    whole = {kind.checkpoint for kind in kinds}.intersection(asked.only or ())
    parts = [word for word in asked.only or () if word not in whole]
    wanted = [
        kind
        for kind in kinds
        if not asked.only or kind.checkpoint in whole or any(word in f"{kind.name} {kind.checkpoint}" for word in parts)
    ]
    names = list(dict.fromkeys(kind.checkpoint for kind in wanted))
    for name in names:
        result = compared(asked.folder / name, asked.device, asked.limit)
        print("pass" if result["passed"] else "FAIL", name, result.get("error", "")[:300], flush=True)
        record = {**_head(asked.device), "checkpoints": {**record["checkpoints"], name: result}}
        file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        file.with_suffix(".md").write_text(page(record), encoding="utf-8")
    return 0 if names and all(record["checkpoints"][name]["passed"] for name in names) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
