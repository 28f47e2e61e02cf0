"""GGUF checkpoints, one file or several, as one `WeightSource` that speaks the hub's names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pagoda.hal.errors import CheckpointError
from pagoda.models.checkpoint import apply
from pagoda.models.loading.gguf_config import gguf_config
from pagoda.models.loading.gguf_file import GgufFile
from pagoda.models.loading.gguf_names import gguf_rules
from pagoda.models.loading.stored import FileTensor
from pagoda.models.weights import Naming
from pagoda.quant.format import StoredTensor

SPLIT = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


class GgufModel:
    """One model in one or several GGUF files.

    Attributes:
        metadata: of the first file, which describes the model.
        tensors: of all files, by GGUF name.
        config: config.json-like; see `gguf_config`.
    """

    def __init__(self, path: Path) -> None:
        files = [GgufFile(part) for part in split_files(path)]
        self.path = path
        self.metadata: Mapping[str, Any] = files[0].metadata
        self.tensors: dict[str, StoredTensor] = {}
        for file in files:
            twice = self.tensors.keys() & file.tensors.keys()
            if twice:
                raise CheckpointError(f"{file.path} repeats tensors of an earlier part: {', '.join(sorted(twice)[:8])}")
            self.tensors.update({name: _with_rank(tensor) for name, tensor in file.tensors.items()})
        self._check_count()
        self.config = gguf_config(self.metadata, self.tensors)

    def source(self) -> GgufSource:
        """The weights under the hub's names."""
        rules = gguf_rules(self.metadata["general.architecture"], self.config)
        return GgufSource(apply(rules, self.tensors))

    def _check_count(self) -> None:
        expected = self.metadata.get("split.tensors.count", len(self.tensors))
        if expected != len(self.tensors):
            raise CheckpointError(f"{self.path}: {expected} tensors are announced, the parts hold {len(self.tensors)}")


def _with_rank(tensor: FileTensor) -> FileTensor:
    # The gate of a shared expert is a matrix of one row, which the converter flattens.
    return (
        replace(tensor, shape=(1, *tensor.shape))
        if tensor.name.endswith("ffn_gate_inp_shexp.weight") and len(tensor.shape) == 1
        else tensor
    )


class GgufSource:
    """A `WeightSource` over a GGUF model: the hub's names, rows in the hub's order; blocks stay blocks."""

    naming: Naming = "hf"

    def __init__(self, tensors: Mapping[str, StoredTensor]) -> None:
        self.tensors = tensors

    def close(self) -> None:
        """Nothing is held open: each read maps its own bytes."""


def split_files(path: Path) -> tuple[Path, ...]:
    """All parts of a model, given any of them. Raises `CheckpointError` when parts are missing."""
    match = SPLIT.search(path.name)
    if match is None:
        return (path,)
    stem, count = path.name[: match.start()], int(match[2])
    parts = tuple(path.with_name(f"{stem}-{number:05d}-of-{match[2]}.gguf") for number in range(1, count + 1))
    missing = [part.name for part in parts if not part.exists()]
    if missing:
        raise CheckpointError(f"{path}: {count} parts are announced; missing here: {', '.join(missing)}; fetch them")
    return parts
