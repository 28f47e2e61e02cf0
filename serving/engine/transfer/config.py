"""`--kv-transfer-config` and `--kv-offloading-size`: which store of pages stands beside the pool. Names are vLLM's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pagoda.hal.errors import ConfigError


@dataclass(frozen=True)
class HostMemory:
    """Up to `nbytes` of host memory, over all ranks."""

    nbytes: int


@dataclass(frozen=True)
class Disk:
    """Files under `folder`, which other engines and later ones of the same model share."""

    folder: str


Storage = HostMemory | Disk

_EXTRA = {
    "OffloadingConnector": ("cpu_bytes_to_use",),
    "ExampleConnector": ("shared_storage_path",),
    "SharedStorageConnector": ("shared_storage_path",),
}
"""Connectors and the key that each needs in `kv_connector_extra_config`."""

_SAME = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
"""Keys that have one value here."""


def storage_of(given: Mapping[str, Any] | None, offloading_size: float | None, *, prefix_caching: bool) -> Storage | None:
    """What the two flags ask for, None for nothing. Raises `ConfigError` that names the connector, key or value."""
    if not given and offloading_size is None:
        return None
    if not prefix_caching:
        raise ConfigError("a store of KV pages is found by prefix: it needs enable_prefix_caching, which is off; turn it on")
    if given and offloading_size is not None:
        raise ConfigError("kv_transfer_config and kv_offloading_size are two ways to ask for one store; give one of them")
    if given:
        return _connector(given)
    assert offloading_size is not None
    if offloading_size <= 0:
        raise ConfigError(f"kv_offloading_size={offloading_size} must be above 0: GiB of host memory")
    return HostMemory(int(offloading_size * 2**30))


def _connector(given: Mapping[str, Any]) -> Storage:
    name, extra = given.get("kv_connector"), given.get("kv_connector_extra_config") or {}
    if name not in _EXTRA:
        raise ConfigError(f"kv_transfer_config: kv_connector {name!r} is not one of {', '.join(_EXTRA)}; name one of them")
    for key, value in given.items():
        if key in _SAME and value != _SAME[key]:
            raise ConfigError(f"kv_transfer_config: {key}={value!r} is not served; there is {_SAME[key]!r}")
        if key not in (*_SAME, "kv_connector", "kv_connector_extra_config"):
            raise ConfigError(f"kv_transfer_config: unknown key {key!r}; there are {', '.join(('kv_connector_extra_config', *_SAME))}")
    (wanted,) = _EXTRA[name]
    if set(extra) != {wanted}:
        raise ConfigError(f"kv_transfer_config: {name} takes {wanted!r} in kv_connector_extra_config, and got {sorted(extra)}")
    return _disk(extra[wanted]) if wanted == "shared_storage_path" else _memory(extra[wanted])


def _disk(folder: Any) -> Disk:
    if not isinstance(folder, str) or not folder:
        raise ConfigError(f"kv_transfer_config: shared_storage_path={folder!r} must be a folder's path")
    return Disk(folder)


def _memory(nbytes: Any) -> HostMemory:
    if isinstance(nbytes, bool) or not isinstance(nbytes, int) or nbytes < 1:
        raise ConfigError(f"kv_transfer_config: cpu_bytes_to_use={nbytes!r} must be a number of bytes")
    return HostMemory(nbytes)
