"""`pagoda kernels build|fetch|list|clear`: what a device needs compiled, made or brought before a start, which then need not wait."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pagoda.hal.errors import ConfigError
from pagoda.ops.kernel_store import Entry, default_root, entries, list_entries
from pagoda.serving.cli.flags import Parser, build
from pagoda.serving.cli.kernels_build import build_for
from pagoda.serving.cli.kernels_fetch import fetch_from, wanted
from pagoda.serving.cli.words import with_model
from pagoda.serving.engine.config import EngineConfig, Flag

USAGE = "pagoda kernels build|fetch|list|clear; each has --help"


@dataclass(frozen=True)
class Where:
    """Of all of them."""

    cache: Annotated[str | None, Flag("Folder of compiled kernels, instead of the one that engines use.", section="Kernels")] = None

    @property
    def root(self) -> Path:
        return Path(self.cache).expanduser() if self.cache else default_root()


@dataclass(frozen=True)
class Target(Where):
    """Of `build` and `fetch`."""

    target: Annotated[str | None, Flag("A device that is not here: sm_90, gfx942, or host for the library for CPUs.", metavar="ARCH")] = (
        None
    )


@dataclass(frozen=True)
class Listing(Where):
    """Of `list`."""

    json: Annotated[bool, Flag("Print JSON instead of text.")] = False


def run(argv: Sequence[str]) -> int:
    actions: dict[str, Callable[[Sequence[str]], int]] = {"build": _build, "fetch": _fetch, "list": _list, "clear": _clear}
    if not argv or argv[0] in ("-h", "--help"):
        print(f"Usage: {USAGE}")
        return 0
    if argv[0] not in actions:
        raise ConfigError(f"{argv[0]!r} was asked of kernels; there is {USAGE}")
    return actions[argv[0]](argv[1:])


def _build(argv: Sequence[str]) -> int:
    summary = "Compile what a model needs on the device here, or on one that is not here."
    parser = Parser("kernels build", summary, "[MODEL] [--target ARCH] [options]", words=1)
    parser.add_config(Target)
    parser.add_config(EngineConfig)
    parser.add_config_file()
    values = with_model(parser.values(argv))
    where = build(Target, values)
    _tell(build_for(build(EngineConfig, values), where.root, where.target))
    return 0


def _fetch(argv: Sequence[str]) -> int:
    summary = "Bring compiled kernels from a folder or URL that has what `build` made; hashes are checked."
    parser = Parser("kernels fetch", summary, "SOURCE [--target ARCH]", words=1)
    parser.add_config(Target)
    values = parser.values(argv)
    if not values.get("words"):
        raise ConfigError("no source was given; pagoda kernels fetch takes a folder or URL of compiled kernels")
    where = build(Target, {name: value for name, value in values.items() if name != "words"})
    for entry in fetch_from(values["words"][0], where.root, wanted(where.target)):
        _tell(entry)
    return 0


def _list(argv: Sequence[str]) -> int:
    parser = Parser("kernels list", "What is compiled, for which devices, and how large it is.")
    parser.add_config(Listing)
    where = build(Listing, parser.values(argv))
    found = entries(where.root)
    if where.json:
        print(json.dumps([_record(entry) for entry in found], indent=2))
    for entry in found if not where.json else ():
        _tell(entry)
    if not found and not where.json:
        print(f"nothing is compiled in {where.root}")
    return 0


def _clear(argv: Sequence[str]) -> int:
    parser = Parser("kernels clear", "Delete compiled kernels: all, or the entries whose names begin so.", "[NAME]", words=1)
    parser.add_config(Where)
    values = parser.values(argv)
    words = values.pop("words", [])
    root = build(Where, values).root
    gone = [entry for entry in entries(root) if not words or entry.folder.name.startswith(words[0])]
    freed = sum(entry.nbytes for entry in gone)
    for entry in gone:
        shutil.rmtree(entry.folder)
    if gone:
        list_entries(root)
    print(f"{len(gone)} entries deleted, {freed / 1e6:.1f} MB")
    return 0


def _record(entry: Entry) -> dict[str, object]:
    return {"name": entry.folder.name, "kernels": entry.kernels, "bytes": entry.nbytes, "built": (entry.index or {}).get("built", [])}


def _tell(entry: Entry) -> None:
    what = ", ".join((entry.index or {}).get("built", [])) or "kept as they were met"
    print(f"{entry.folder.name}  {entry.kernels} kernels, {entry.nbytes / 1e6:.1f} MB; {what}")
