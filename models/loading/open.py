"""A checkpoint on disk, whatever its kind: its configuration, and how to open its weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagoda.hal.errors import CheckpointError, ConfigError
from pagoda.models.config import sensible
from pagoda.models.loading.gguf_config import gguf_generation_config
from pagoda.models.loading.gguf_source import GgufModel
from pagoda.models.loading.json_file import read_json
from pagoda.models.loading.respelled import respelled, respelled_name
from pagoda.models.loading.safetensors_source import SafetensorsSource, safetensors_files
from pagoda.models.loading.sentence_transformers import KEY, WithModules, modules_of
from pagoda.models.loading.torch_source import torch_files, torch_source
from pagoda.models.weights import RenamedSource, WeightSource


@dataclass(frozen=True)
class Checkpoint:
    """A model's configuration, and how to open its weights.

    Attributes:
        config, generation_config: as in the JSON files (GGUF metadata is translated).
        open: opens the weights; None for dummy weights.
        where: for messages.
    """

    config: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    open: Callable[[], WeightSource] | None
    where: str


@sensible
def open_checkpoint(path: str | Path, load_format: str = "auto", overrides: Mapping[str, Any] | None = None) -> Checkpoint:
    """Read the configuration of a local folder or GGUF file.

    Args:
        load_format: "auto", "safetensors", "gguf" or "dummy", as `--load-format`.
        overrides: keys of config.json to replace.

    Raises `ConfigError` when there is nothing to read at `path`, `CheckpointError` when what is there is damaged.
    """
    path = Path(path)
    kind = _kind(path)
    if load_format not in ("auto", "dummy", kind):
        raise ConfigError(f"load_format={load_format!r} was asked for, {path} holds {kind}; leave --load-format at auto")
    checkpoint = _gguf(path, overrides or {}) if kind == "gguf" else _folder(path, overrides or {})
    return checkpoint if load_format != "dummy" else Checkpoint(checkpoint.config, checkpoint.generation_config, None, checkpoint.where)


def _kind(path: Path) -> str:
    if path.is_file() and path.suffix == ".gguf":
        return "gguf"
    if not (path / "config.json").is_file():
        raise ConfigError(
            f"{path} holds no config.json and is no GGUF file; give a checkpoint folder, a GGUF file, or a name from `pagoda list`"
        )
    return "safetensors"


def _gguf(path: Path, overrides: Mapping[str, Any]) -> Checkpoint:
    model = GgufModel(path)
    return Checkpoint({**model.config, **overrides}, gguf_generation_config(model.metadata), model.source, str(path))


def _folder(path: Path, overrides: Mapping[str, Any]) -> Checkpoint:
    config = {**_json(path / "config.json"), **overrides}
    generation = _json(path / "generation_config.json") if (path / "generation_config.json").is_file() else {}
    if respelled(config) is not config:
        return Checkpoint(respelled(config), generation, lambda: RenamedSource(_folder_source(path), respelled_name), str(path))
    modules = modules_of(path)
    if modules is None:
        return Checkpoint(config, generation, lambda: _folder_source(path), str(path))
    source = lambda: WithModules(_folder_source(path), modules.dense)  # noqa: E731
    return Checkpoint({**config, KEY: modules.as_config()}, generation, source, str(path))


def _folder_source(path: Path) -> WeightSource:
    files, index = safetensors_files(path)
    if files:
        return SafetensorsSource(files, index)
    pickled = torch_files(path)
    if not pickled:
        raise CheckpointError(
            f"{path} holds no weights: no safetensors files, no pytorch_model.bin; fetch them, or use --load-format dummy"
        )
    return torch_source(pickled)


def _json(path: Path) -> dict[str, Any]:
    values = read_json(path)
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} must hold a JSON object, found {type(values).__name__}")
    return values
