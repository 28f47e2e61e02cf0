"""Who is held to the contract: `python ci/matrix.py` lists the rows, with a NAME it prints that row's commands for a shell.

`--workflow` writes .github/workflows/conformance.yaml from the rows, a job for each of their devices; `--check` says whether it is current.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
ROWS = ROOT / "ci/matrix.yaml"
WORKFLOW = ROOT / ".github/workflows/conformance.yaml"


class _Literal(yaml.SafeDumper):
    """Texts of several lines as a person would write them."""


_Literal.add_representer(
    str, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)
)


def rows() -> dict[str, dict[str, Any]]:
    return yaml.safe_load(ROWS.read_text())


def commands(row: dict[str, Any]) -> list[str]:
    """Install, then conformance of each device, whose report is what "supported" means."""
    levels = " ".join(f"--level {level}" for level in row["levels"])
    checks = [f"pagoda conformance --device {device} {levels} --markdown {device}.md --junit {device}.xml" for device in row["devices"]]
    return [*row["install"], *checks]


def workflow() -> str:
    """The workflow's text: one job a device, on its row's runner and image, one more where a row has a simulation; the reports are kept."""
    jobs: dict[str, Any] = {}
    for name, row in rows().items():
        for device in row["devices"]:
            jobs[device] = _job(row, commands({**row, "devices": [device]}), device)
        if "simulated" in row:
            here = {"runner": ["linux", "x64"], "image": "none"}
            jobs[f"{name}-simulated"] = _job(here, row["simulated"], f"{name}-simulated", 180)
    head = "# Made by `python ci/matrix.py --workflow` from ci/matrix.yaml; do not edit.\n"
    return head + yaml.dump(
        {"name": "conformance", "on": {"workflow_dispatch": None, "schedule": [{"cron": "17 3 * * *"}]}, "jobs": jobs},
        Dumper=_Literal,
        sort_keys=False,
        width=200,
    )


def _job(row: dict[str, Any], run: list[str], name: str, minutes: int = 90) -> dict[str, Any]:
    hosted = "self-hosted" not in row["runner"]
    place = {"runs-on": "ubuntu-latest" if hosted else row["runner"]} | ({} if row["image"] == "none" else {"container": row["image"]})
    path = "set -eu\nPATH=$PWD/.venv/bin:$PATH" if "make install" in run else "set -eu"
    steps: list[dict[str, Any]] = [
        {"uses": "actions/checkout@v4"},
        {"run": "\n".join([path, *run]) + "\n"},
        {"uses": "actions/upload-artifact@v4", "if": "always()", "with": {"name": name, "path": "*.md\n*.xml\n"}},
    ]
    return {**place, "timeout-minutes": minutes, "steps": steps}


def main(arguments: list[str]) -> int:
    if arguments == ["--workflow"]:
        WORKFLOW.parent.mkdir(parents=True, exist_ok=True)
        WORKFLOW.write_text(workflow())
        return 0
    if arguments == ["--check"]:
        current = WORKFLOW.exists() and WORKFLOW.read_text() == workflow()
        print("the workflow is current" if current else f"{WORKFLOW.relative_to(ROOT)} is not current: python ci/matrix.py --workflow")
        return 0 if current else 1
    return _show(arguments)


def _show(names: list[str]) -> int:
    everything = rows()
    unknown = [name for name in names if name not in everything]
    if unknown:
        print(f"no row {unknown[0]!r}; there are {', '.join(everything)}", file=sys.stderr)
        return 2
    if names:
        print("\n".join(command for name in names for command in commands(everything[name])))
        return 0
    for name, row in everything.items():
        print(f"{name:10} {row['shown']:14} levels {', '.join(map(str, row['levels'])) or 'none':18} {' '.join(row['runner'])}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
