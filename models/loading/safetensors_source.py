"""Safetensors checkpoints: one file, or shards with or without an index, as one `WeightSource`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from pagoda.hal.errors import CheckpointError
from pagoda.models.loading.json_file import read_json
from pagoda.models.loading.safetensors_header import read_header
from pagoda.models.loading.stored import FileTensor
from pagoda.models.weights import Naming
from pagoda.quant.format import StoredTensor

INDEX_SUFFIX = ".safetensors.index.json"
SHARD = re.compile(r"-(\d{5})-of-(\d{5})\.safetensors$")
SHOWN = 8
"""How many names a message lists."""


class SafetensorsSource:
    """A `WeightSource` over safetensors files.

    Args:
        files: the shards; `safetensors_files` finds those of a folder.
        index: the index file that says which tensor is in which shard, when there is one.
    """

    naming: Naming = "hf"

    def __init__(self, files: Sequence[Path], index: Path | None = None) -> None:
        shards = {path: read_header(path) for path in files}
        self.tensors: Mapping[str, StoredTensor] = _merge(shards)
        if index is not None:
            _check_index(index, shards)

    def close(self) -> None:
        """Nothing is held open: each read maps its own bytes."""


def safetensors_files(folder: Path) -> tuple[tuple[Path, ...], Path | None]:
    """The weight files of a checkpoint folder and its index. Raises `CheckpointError` when shards are missing."""
    indexes = sorted(folder.glob(f"*{INDEX_SUFFIX}"))
    index = next((path for path in indexes if path.name == f"model{INDEX_SUFFIX}"), indexes[0] if indexes else None)
    if index is not None:
        files = tuple(folder / name for name in sorted(set(read_index(index).values())))
        _refuse_missing(index, [path.name for path in files if not path.exists()])
        return files, index
    files = tuple(sorted(path for path in folder.glob("*.safetensors") if _is_weights(path)))
    # Where the weights have their usual name, other files hold something else.
    files = tuple(path for path in files if path.name.startswith("model")) or files
    _check_shard_numbers(folder, files)
    return files, None


def read_index(index: Path) -> dict[str, str]:
    """Tensor name → shard's file name."""
    content = read_json(index)
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{index} is no index of shards: expected a JSON object whose weight_map says which file holds each tensor")
    outside = sorted({name for name in weight_map.values() if Path(name).name != name})
    if outside:
        raise CheckpointError(f"{index} names files outside its folder: {', '.join(outside[:SHOWN])}")
    return weight_map


def _is_weights(path: Path) -> bool:
    # Mistral's repositories hold the weights twice, once under its own names.
    return not path.name.startswith(("consolidated", "adapter_model"))


def _check_shard_numbers(folder: Path, files: Sequence[Path]) -> None:
    found = [(int(match[1]), int(match[2])) for path in files if (match := SHARD.search(path.name))]
    if not found:
        return
    total = found[0][1]
    missing = sorted(set(range(1, total + 1)) - {number for number, _ in found})
    if missing:
        numbers = ", ".join(map(str, missing[:SHOWN]))
        raise CheckpointError(f"{folder}: {total} shards are announced, {len(found)} are here; missing: {numbers}; fetch them")


def _refuse_missing(index: Path, missing: Sequence[str]) -> None:
    if missing:
        raise CheckpointError(f"{index} names shards that are not here: {_names(missing)}; fetch them")


def _merge(shards: Mapping[Path, Mapping[str, FileTensor]]) -> dict[str, FileTensor]:
    merged: dict[str, FileTensor] = {}
    twice = []
    for path, tensors in shards.items():
        twice += [f"{name} ({merged[name].path.name}, {path.name})" for name in tensors.keys() & merged.keys()]
        merged.update(tensors)
    if twice:
        raise CheckpointError(f"tensors that two shards hold: {_names(sorted(twice))}")
    return merged


def _check_index(index: Path, shards: Mapping[Path, Mapping[str, FileTensor]]) -> None:
    weight_map = read_index(index)
    held = {path.name: tensors.keys() for path, tensors in shards.items()}
    lost = sorted(f"{name} in {shard}" for name, shard in weight_map.items() if name not in held.get(shard, ()))
    extra = sorted(f"{name} of {shard}" for shard, names in held.items() for name in names if name not in weight_map)
    problems = []
    if lost:
        problems.append(f"{len(lost)} tensors are not where it says: {_names(lost)}")
    if extra:
        problems.append(f"{len(extra)} tensors have no entry: {_names(extra)}")
    if problems:
        raise CheckpointError(f"{index}: {'; '.join(problems)}")


def _names(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
