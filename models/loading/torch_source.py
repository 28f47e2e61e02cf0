"""Checkpoints in PyTorch's own format, one file or several, as a `WeightSource`; nothing but tensors is ever unpickled."""

from __future__ import annotations

import pickle
from pathlib import Path

import torch
from pagoda.hal.errors import CheckpointError
from pagoda.models.loading.memory_source import MemorySource
from pagoda.models.loading.safetensors_source import read_index

INDEX = "pytorch_model.bin.index.json"


def torch_files(folder: Path) -> tuple[Path, ...]:
    """The weight files of a folder, by its index where it has one; empty when there are none. Raises `CheckpointError` for missing ones."""
    index = folder / INDEX
    if not index.exists():
        return tuple(sorted(folder.glob("pytorch_model*.bin")))
    names = sorted(set(read_index(index).values()))
    missing = [name for name in names if not (folder / name).exists()]
    if missing:
        raise CheckpointError(f"{index} names files that are not here: {', '.join(missing[:8])}; fetch them")
    return tuple(folder / name for name in names)


def torch_source(files: tuple[Path, ...]) -> MemorySource:
    """The tensors of these files, mapped and not read. Raises `CheckpointError` for a damaged file or one that holds more than tensors."""
    return MemorySource.drain(pair for file in files for pair in _tensors(file).items())


def _tensors(file: Path) -> dict[str, torch.Tensor]:
    try:
        state = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError, OSError) as error:
        first = str(error).splitlines()[0]
        raise CheckpointError(f"{file} can not be read as a file of tensors: {first}; fetch it again, or use safetensors") from None
    found = state if isinstance(state, dict) else {}
    tensors = {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}
    if not tensors:
        raise CheckpointError(f"{file} holds a {type(state).__name__} without tensors, expected a state dict")
    return tensors
