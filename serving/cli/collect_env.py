"""`pagoda collect-env`: what a bug report needs: versions, machine, devices. Names no user, path or address."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

from pagoda import __version__
from pagoda.hal.discovery import find_all
from pagoda.serving.cli.flags import Parser, build
from pagoda.serving.engine.config import Flag

PACKAGES = (
    "torch", "triton", "numpy", "tokenizers", "safetensors", "gguf", "huggingface-hub", "transformers", "jinja2", "msgspec", "pyzmq",
    "starlette", "uvicorn", "uvloop", "flashinfer-python", "nvidia-cudnn-frontend",
)  # fmt: skip


@dataclass(frozen=True)
class Options:
    """Of `pagoda collect-env`."""

    json: Annotated[bool, Flag("Print JSON instead of text.")] = False


def run(argv: Sequence[str]) -> int:
    parser = Parser("collect-env", "Versions, machine and devices, for a bug report.")
    parser.add_config(Options)
    facts = collect()
    print(json.dumps(facts, indent=2) if build(Options, parser.values(argv)).json else _text(facts))
    return 0


def collect() -> dict[str, Any]:
    """Everything, by section."""
    return {
        "pagoda": {"version": __version__, "python": sys.version.split()[0], "platform": platform.platform()},
        "machine": {"cpu": _cpu(), "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()}
        | {"memory_gib": _memory_gib()},
        "packages": {name: found for name in PACKAGES if (found := _version(name)) is not None},
        "devices": {listed.name: listed.probe.message for listed in find_all()},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor() or platform.machine()
    )


def _memory_gib() -> float | None:
    if not hasattr(os, "sysconf") or "SC_PHYS_PAGES" not in os.sysconf_names:
        return None
    return round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1)


def _text(facts: dict[str, Any]) -> str:
    width = max(len(name) for section in facts.values() for name in section)
    lines = []
    for title, section in facts.items():
        lines += [f"[{title}]", *(f"{name:{width}}  {value}" for name, value in section.items()), ""]
    return "\n".join(lines).rstrip()
