"""`python ci/matrix.py` lists who is held to the contract; with a NAME it prints the commands of that row, for a shell."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml

ROWS = Path(__file__).resolve().parent / "matrix.yaml"


def rows() -> dict[str, dict[str, Any]]:
    return yaml.safe_load(ROWS.read_text())


def commands(row: dict[str, Any]) -> list[str]:
    """Install, then conformance of each device, whose report is what "supported" means."""
    levels = " ".join(f"--level {level}" for level in row["levels"])
    checks = [f"pagoda conformance --device {device} {levels} --markdown {device}.md --junit {device}.xml" for device in row["devices"]]
    return [*row["install"], *checks]


def main(names: list[str]) -> int:
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
