"""What a checkpoint folder says to sentence-transformers: how it pools, projects and normalises, and the projections' own files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagoda.hal.errors import CheckpointError, ModelError
from pagoda.models.loading.json_file import read_json
from pagoda.models.loading.safetensors_source import SafetensorsSource, safetensors_files
from pagoda.models.loading.torch_source import torch_files, torch_source
from pagoda.models.views import Renamed
from pagoda.models.weights import Naming, WeightSource
from pagoda.quant.format import StoredTensor

KEY = "pagoda_modules"
"""Under which the configuration of a checkpoint carries what `modules_of` found."""

POOLINGS = {"cls": "cls", "cls_token": "cls", "mean": "mean", "mean_tokens": "mean", "lasttoken": "last"}
"""Their word for a pooling → ours."""


@dataclass(frozen=True)
class Modules:
    """What `modules.json` lists, in our words; `dense` are folders of projections, in order.

    Attributes:
        pooling: "cls", "mean" or "last"; None: every token has a vector of its own.
    """

    pooling: str | None
    normalize: bool
    dense: tuple[Path, ...]
    max_tokens: int | None

    def as_config(self) -> dict[str, Any]:
        """For the configuration: projections by size and activation."""
        dense = [read_json(folder / "config.json") for folder in self.dense]
        return {"pooling": self.pooling, "normalize": self.normalize, "dense": dense, "max_tokens": self.max_tokens}


def modules_of(folder: Path) -> Modules | None:
    """None where the folder is none of theirs. Raises `ModelError` for a module that is not known."""
    path = folder / "modules.json"
    if not path.is_file():
        return None
    listed = read_json(path)
    pooling, normalize, dense = None, False, []
    for module in listed if isinstance(listed, list) else []:
        kind, where = str(module.get("type", "")).rpartition(".")[2], folder / str(module.get("path", ""))
        match kind:
            case "Transformer":
                continue
            case "Pooling":
                pooling = _pooling(where)
            case "Normalize":
                normalize = True
            case "Dense":
                dense.append(where)
            case _:
                raise ModelError(f"{path} lists a module of type {module.get('type')!r}; known: Transformer, Pooling, Dense, Normalize")
    return Modules(pooling, normalize, tuple(dense), _max_tokens(folder))


def _pooling(folder: Path) -> str:
    values = read_json(folder / "config.json")
    named = values.get("pooling_mode")
    found = [named] if isinstance(named, str) else [key.removeprefix("pooling_mode_") for key, value in values.items() if value is True]
    found = [name for name in found if name in POOLINGS or name not in ("include_prompt",)]
    if len(found) != 1 or found[0] not in POOLINGS:
        raise ModelError(f"{folder}/config.json pools by {', '.join(found) or 'nothing'}; implemented is one of {', '.join(POOLINGS)}")
    return POOLINGS[found[0]]


def _max_tokens(folder: Path) -> int | None:
    for name in ("sentence_bert_config.json", "sentence_roberta_config.json", "sentence_xlm-roberta_config.json"):
        if (folder / name).is_file():
            value = read_json(folder / name).get("max_seq_length")
            return value if isinstance(value, int) else None
    return None


class WithModules:
    """A `WeightSource` with the projections' tensors beside the model's, as `KEY.{place}.…`."""

    naming: Naming

    def __init__(self, base: WeightSource, folders: tuple[Path, ...]) -> None:
        self._sources = (base, *(_source(folder) for folder in folders))
        self.naming = base.naming
        tensors: dict[str, StoredTensor] = dict(base.tensors)
        for place, source in enumerate(self._sources[1:]):
            for name, tensor in source.tensors.items():
                tensors[f"{KEY}.{place}.{name.removeprefix('linear.')}"] = Renamed(tensor.name, tensor)
        self.tensors: Mapping[str, StoredTensor] = tensors

    def close(self) -> None:
        for source in self._sources:
            source.close()


def _source(folder: Path) -> WeightSource:
    files, index = safetensors_files(folder)
    if files:
        return SafetensorsSource(files, index)
    pickled = torch_files(folder)
    if not pickled:
        raise CheckpointError(f"{folder} holds no weights of its projection; fetch the model again")
    return torch_source(pickled)
