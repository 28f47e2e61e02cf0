"""`pagoda list`: the models that are on this machine."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from pagoda.models.loading.hub import Hub, cached
from pagoda.models.loading.reference import PACKAGED


@dataclass(frozen=True)
class Listed:
    """A model by the name to serve it under. `path`: empty where it is not here, and `note` says what brings it."""

    name: str
    nbytes: int
    path: str
    used: str
    note: str


def list_models(as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False) -> None:
    """List the models on this machine, with their sizes."""
    models = find(Hub())
    typer.echo(json.dumps([vars(model) for model in models], indent=2) if as_json else "\n".join(_lines(models)))


def find(hub: Hub) -> list[Listed]:
    """The packaged models first, the one that is served by default at the top, then those of the hub's cache."""
    found = []
    for name, packaged in PACKAGED.items():
        file = packaged.file()
        size, note = (_bytes(file), packaged.about) if file else (0, f"not installed; run: {packaged.command}")
        found.append(Listed(name, size, str(file or ""), "", note))
    for model in cached(hub):
        used = datetime.fromtimestamp(model.used, UTC).isoformat(timespec="seconds")
        found.append(Listed(model.name, model.nbytes, str(model.path), used, f"{len(model.revisions)} revision(s)"))
    return found


def _bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in (path.rglob("*") if path.is_dir() else (path,)) if file.is_file())


def _lines(models: list[Listed]) -> list[str]:
    width = max(len(model.name) for model in models)
    return [f"{model.name:{width}}  {_size(model.nbytes):>10}  {model.used[:10]:10}  {model.note}" for model in models]


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.1f} MB" if nbytes else "-"
