"""Make the package importable without an install: `python ci/link.py DIR` fills DIR with a symlink `pagoda` to the root
and a dist-info made from pyproject.toml, so that `PYTHONPATH=DIR` finds both the package and its entry points."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def link(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    symlink = folder / "pagoda"
    if not symlink.exists():
        symlink.symlink_to(ROOT)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    info = folder / "pagoda_llm-0.1.0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text(_entry_points(project))


def _entry_points(project: dict) -> str:
    groups = {"console_scripts": project.get("scripts", {}), **project.get("entry-points", {})}
    return "".join(f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in points.items()) + "\n" for group, points in groups.items())


if __name__ == "__main__":
    link(Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / ".site"))
