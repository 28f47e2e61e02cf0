"""Compiled kernels on disk: an entry for each kind of device and version of all that they are made of, with an index of hashes.

An entry is a folder `ARCH-DIGEST`: the digest is of the versions and sources behind it, so that a stale one is never used. The shapes that
a kernel was compiled for are part of the names inside, as the compiler gives them. `index.json` says what belongs to an entry.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import Any

from pagoda.hal.errors import ConfigError
from pagoda.hal.info import DeviceInfo, Feature
from pagoda.ops.native import build as native

INDEX = "index.json"
HOST = "host"
"""Prefix of the architecture of entries that hold the library for CPUs."""


def default_root() -> Path:
    """Where entries are kept: `pagoda/kernels` in the user's folder for caches."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pagoda" / "kernels"


@dataclass(frozen=True)
class Key:
    """What an entry is for.

    Attributes:
        arch: `DeviceInfo.arch`, or `host-` and the machine of a CPU.
        compiler: which compiler, and its version. sources: digest of the kernels' sources and tuned ways.
    """

    arch: str
    compiler: str
    sources: str

    @property
    def name(self) -> str:
        return f"{self.arch}-{hashlib.sha256(json.dumps(vars(self), sort_keys=True).encode()).hexdigest()[:16]}"


def key_of(info: DeviceInfo) -> Key | None:
    """The key of this installation for a device; None for one whose kernels are not compiled at run time."""
    if Feature.TRITON not in info.features or find_spec("triton") is None:
        return None
    return Key(info.arch, f"triton {version('triton')}", _digest(Path(__file__).parent / "triton"))


def host_key() -> Key:
    """The key of the library for CPUs of this machine's kind."""
    return Key(f"{HOST}-{platform.machine()}", "C++", native.library().stem.rpartition("-")[2])


def kept_library(root: Path | None = None) -> Path:
    """Where the library for CPUs lies in its entry, if it does."""
    return (root or default_root()) / host_key().name / native.library().name


@cache
def _digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted([*folder.glob("*.py"), *folder.glob("*.json")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def use(info: DeviceInfo, root: Path | None = None) -> Path | None:
    """Have kernels for the device found and kept in its entry; returns the entry's folder, or None where there is nothing to keep.

    A folder that the compiler's own settings name (`TRITON_CACHE_DIR`) is left alone.
    """
    key = key_of(info)
    if key is None or (root is None and "TRITON_CACHE_DIR" in os.environ):
        return None
    folder = (root or default_root()) / key.name
    import_module("pagoda.ops.triton.cache_folder").use(folder)
    return folder


@dataclass(frozen=True)
class Entry:
    """An entry on disk. `index` is None where nothing was built ahead: kernels were kept as they were met."""

    folder: Path
    index: dict[str, Any] | None

    @property
    def nbytes(self) -> int:
        return sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())

    @property
    def kernels(self) -> int:
        """Compiled kernels, or libraries."""
        return sum(1 for path in self.folder.rglob("*") if path.suffix in (".cubin", ".hsaco") or path.name.startswith("libpagoda"))


def entries(root: Path) -> list[Entry]:
    """Those of a folder, by name."""
    folders = sorted(path for path in root.iterdir() if path.is_dir()) if root.is_dir() else []
    return [Entry(folder, read_index(folder)) for folder in folders]


def read_index(folder: Path) -> dict[str, Any] | None:
    path = folder / INDEX
    index: dict[str, Any] | None = json.loads(path.read_text()) if path.exists() else None
    return index


def write_index(root: Path, key: Key, built: str) -> Entry:
    """Write down what is in the entry now, `built` being what for; the root's own index names all entries."""
    folder = root / key.name
    before = (read_index(folder) or {}).get("built", [])
    files = {str(path.relative_to(folder).as_posix()): _facts(path) for path in sorted(folder.rglob("*")) if _belongs(path)}
    index = {"key": vars(key), "built": sorted({*before, built}), "files": files}
    _write(folder / INDEX, json.dumps(index, indent=1, sort_keys=True))
    list_entries(root)
    return Entry(folder, index)


def list_entries(root: Path) -> None:
    """Write the root's index: each entry that was built ahead, with the digest of its own index."""
    names = {one.folder.name: sha256((one.folder / INDEX).read_bytes()) for one in entries(root) if one.index is not None}
    _write(root / INDEX, json.dumps({"entries": names}, indent=1, sort_keys=True))


def checked_path(folder: Path, name: str) -> Path:
    """Where a file of an index belongs. Raises `ConfigError` for a name that leads out of the entry."""
    parts = PurePosixPath(name).parts
    if not parts or ".." in parts or PurePosixPath(name).is_absolute() or "\\" in name or ":" in name:
        raise ConfigError(f"the index names {name!r}, which is no file within the entry; do not use this source")
    return folder.joinpath(*parts)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _facts(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    return {"sha256": sha256(data), "bytes": len(data)}


def _belongs(path: Path) -> bool:
    return path.is_file() and path.name != INDEX and ".tmp" not in path.suffixes


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    part.write_text(text + "\n", encoding="utf-8")
    part.replace(path)
