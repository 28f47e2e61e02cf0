"""What is installed, from metadata and files; whether a package loads, tried in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from importlib.metadata import EntryPoint, PackageNotFoundError, distribution, entry_points
from pathlib import Path
from typing import NamedTuple

PATIENCE_S = 300
"""Vendor packages take up to ten seconds to import, over a minute where eight processes share each core; less would call those broken."""


class Installed(NamedTuple):
    """A distribution: its version ("" when absent), whether it can serve, a clause that says why not, and the folder it lies in."""

    version: str
    usable: bool
    words: str
    folder: Path | None


def installed(name: str, library: str = "") -> Installed:
    """Look a distribution up; with `library`, a pattern among torch's libraries, it must be a build that has it."""
    try:
        found = distribution(name)
    except PackageNotFoundError:
        return Installed("", False, f"{name} is not installed", None)
    folder = Path(str(found.locate_file("")))
    if library and not any((folder / "torch/lib").glob(library)):
        return Installed(found.version, False, f"{name} {found.version} is a build without it", folder)
    return Installed(found.version, True, "", folder)


@cache
def loads(module: str) -> str:
    """Empty when `import module` works in a fresh process; else the last line of what it says."""
    try:
        done = subprocess.run([sys.executable, "-c", f"import {module}"], capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    except subprocess.TimeoutExpired:
        return f"no answer within {PATIENCE_S} s"
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    return "" if done.returncode == 0 else (lines[-1] if lines else f"the process ended with {done.returncode}")


def autoload_trouble() -> str:
    """Whether a package that torch loads by itself (entry points `torch.backends`) breaks `import torch` for everybody, and which."""
    points = sorted(entry_points(group="torch.backends"))
    error = loads("torch") if points else ""
    if not error:
        return ""
    guilty = next((point for point in points if loads(point.module)), points[0])
    name = _owner(guilty)
    return (
        f"import torch fails in this installation, because {name} is loaded with it: {loads(guilty.module) or error};"
        f" remove it with pip uninstall {name.split()[0]}, or set TORCH_DEVICE_BACKEND_AUTOLOAD=0"
    )


def loaded_by_torch(module: str) -> bool:
    """Whether `import torch` imports it as well."""
    return any(point.module.split(".")[0] == module.split(".")[0] for point in entry_points(group="torch.backends"))


def _owner(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist is not None else point.module
