"""Brings compiled kernels from a folder or over HTTP: what an index names, checked against its hashes, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from pagoda.hal.discovery import find_all
from pagoda.hal.errors import ConfigError
from pagoda.ops import kernel_store
from pagoda.ops.kernel_store import INDEX, Entry, Key
from pagoda.serving.cli.kernels_build import described

Read = Callable[[str], bytes]


def wanted(target: str | None) -> list[Key]:
    """What this installation can use on the devices here and its CPU, or on the target alone."""
    if target == kernel_store.HOST:
        return [kernel_store.host_key()]
    infos = (
        [described(target)[1]]
        if target
        else [info for one in find_all() if one.backend and one.probe.available for info in one.backend.devices()]
    )
    keys = [key for info in infos if (key := kernel_store.key_of(info)) is not None]
    return list(dict.fromkeys(keys if target else [*keys, kernel_store.host_key()]))


def fetch_from(source: str, root: Path, keys: list[Key]) -> list[Entry]:
    """Bring the entries of `keys` that the source has. Raises `ConfigError` when it has none, or when a file is not what its index says."""
    read = _reader(source)
    offered = _parsed(read(INDEX), source).get("entries", {})
    found = [key for key in keys if key.name in offered]
    if not found:
        raise ConfigError(
            f"{source} has {', '.join(offered) or 'nothing'}; this installation needs {' or '.join(key.name for key in keys) or 'none'}:"
            " build them there with the same versions of Pagoda and Triton"
        )
    return [_fetch(read, source, root, key, offered[key.name]) for key in found]


def _fetch(read: Read, source: str, root: Path, key: Key, digest: str) -> Entry:
    """All files before the index, so that what was broken off does not count as there."""
    text = _checked(read(f"{key.name}/{INDEX}"), digest, f"{source}/{key.name}/{INDEX}")
    index, folder = _parsed(text, source), root / key.name
    for name, facts in index["files"].items():
        path = kernel_store.checked_path(folder, name)
        if path.exists() and kernel_store.sha256(path.read_bytes()) == facts["sha256"]:
            continue
        _put(path, _checked(read(f"{key.name}/{name}"), facts["sha256"], f"{source}/{key.name}/{name}"))
    _put(folder / INDEX, text)
    kernel_store.list_entries(root)
    return Entry(folder, index)


def _reader(source: str) -> Read:
    if not source.startswith(("http://", "https://")):
        return lambda name: _read_file(Path(source).expanduser(), name)
    client = httpx.Client(follow_redirects=True, timeout=60)

    def read(name: str) -> bytes:
        try:
            return client.get(f"{source.rstrip('/')}/{name}").raise_for_status().content
        except httpx.HTTPError as error:
            raise ConfigError(f"{source}/{name} could not be fetched: {error}; give the folder or URL that holds {INDEX}") from error

    return read


def _read_file(folder: Path, name: str) -> bytes:
    try:
        return (folder / name).read_bytes()
    except OSError as error:
        raise ConfigError(f"{folder / name} could not be read: {error.strerror}; give the folder or URL that holds {INDEX}") from error


def _parsed(text: bytes, source: str) -> dict[str, Any]:
    try:
        return dict(json.loads(text))
    except ValueError as error:
        raise ConfigError(
            f"{source} has an {INDEX} that is no JSON: {error}; give the folder or URL that `pagoda kernels build` wrote"
        ) from error


def _checked(data: bytes, digest: str, where: str) -> bytes:
    found = kernel_store.sha256(data)
    if found != digest:
        raise ConfigError(f"{where} has sha256 {found}, its index says {digest}; it was damaged or changed, nothing of it is used")
    return data


def _put(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".tmp")
    part.write_bytes(data)
    part.replace(path)
