"""Models of the Hugging Face hub: fetched into its cache, listed there, removed from there. Needs no torch."""

from __future__ import annotations

import errno
import logging
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub import constants, errors
from huggingface_hub.utils import tqdm
from pagoda.hal.errors import CapacityError, ConfigError

TEXT_FILES = ("*.json", "*.jinja", "*.txt", "tokenizer*", "*.model", "additional_chat_templates/*")
NOT_WANTED = ("original/*", "onnx/*", "consolidated*", "coreml/*", "openvino/*", "flax_model*", "tf_model*")
"""The same weights in formats that are not read, in repositories that hold several."""


@dataclass(frozen=True)
class Hub:
    """Where models come from and are kept; None is the library's own default (`hf auth login`, its cache folder, the public hub)."""

    token: str | None = None
    endpoint: str | None = None
    cache: Path | None = None

    @property
    def folder(self) -> Path:
        return Path(self.cache or constants.HF_HUB_CACHE)


@dataclass(frozen=True)
class CachedModel:
    """A model in the cache.

    Attributes:
        name: hub id. nbytes: on disk, all revisions. path: its folder in the cache. used: seconds since the epoch, last access.
        revisions: commits that are here.
    """

    name: str
    nbytes: int
    path: Path
    used: float
    revisions: tuple[str, ...]


def fetch(hub: Hub, repository: str, revision: str | None = None, variant: str | None = None) -> Path:
    """A model's folder in the cache, or its GGUF file; brought there when it is not yet, or not whole.

    Args:
        variant: part of the name of the GGUF file to take, such as "Q4_K_M".

    Raises `ConfigError` when there is no such model, no access or no network, `CapacityError` when the disk is too small.
    """
    with _told(hub, repository, revision):
        try:
            names = _listing(hub, repository, revision)
        except _Unreachable as silence:
            folder = _in_cache(hub, repository, revision, str(silence))
            _, gguf = _wanted(repository, [path.relative_to(folder).as_posix() for path in folder.rglob("*")], variant)
        else:
            patterns, gguf = _wanted(repository, names, variant)
            folder = _download(hub, repository, revision, patterns)
    return folder / gguf if gguf else folder


def cached(hub: Hub) -> list[CachedModel]:
    """The models in the cache, by name."""
    if not hub.folder.is_dir():
        return []
    repositories = huggingface_hub.scan_cache_dir(hub.folder).repos
    models = [repository for repository in repositories if repository.repo_type == "model"]
    return sorted((_cached_model(repository) for repository in models), key=lambda model: model.name)


def remove(hub: Hub, repository: str) -> CachedModel:
    """Delete a model from the cache; returns what was there. Raises `ConfigError` when it is not."""
    found = {model.name: model for model in cached(hub)}
    if repository not in found:
        here = ", ".join(found) or "no model"
        raise ConfigError(f"model {repository} is not in the cache {hub.folder}; there is {here}")
    # Not by commit: a copied repository has the commits of the one it was copied from.
    shutil.rmtree(found[repository].path)
    shutil.rmtree(hub.folder / ".locks" / found[repository].path.name, ignore_errors=True)
    return found[repository]


def _cached_model(repository: Any) -> CachedModel:
    commits = tuple(sorted(revision.commit_hash for revision in repository.revisions))
    return CachedModel(repository.repo_id, repository.size_on_disk, Path(repository.repo_path), repository.last_accessed, commits)


class _Unreachable(Exception):
    """The hub does not answer."""


def _listing(hub: Hub, repository: str, revision: str | None) -> Sequence[str]:
    try:
        info = huggingface_hub.HfApi(endpoint=hub.endpoint, token=hub.token).model_info(repository, revision=revision, timeout=10)
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.HFValidationError):
        raise
    except Exception as error:  # no network, name resolution, proxies, a hub that is down: each has its own class
        raise _Unreachable(type(error).__name__) from error
    return [file.rfilename for file in info.siblings or ()]


def _in_cache(hub: Hub, repository: str, revision: str | None, silence: str) -> Path:
    try:
        return Path(huggingface_hub.snapshot_download(repository, revision=revision, cache_dir=hub.folder, local_files_only=True))
    except errors.IncompleteSnapshotError as error:  # files that were never wanted count as missing, too
        return Path(error.snapshot_path)
    except errors.LocalEntryNotFoundError:
        raise ConfigError(
            f"model {repository} is not in the cache {hub.folder}, and the hub can not be reached ({silence});"
            " connect, or give a local folder or GGUF file"
        ) from None


def _wanted(repository: str, names: Sequence[str], variant: str | None) -> tuple[list[str], str | None]:
    """Patterns to fetch, and the GGUF file that is the model, if it is one."""
    weights = [name for name in names if name.endswith(".safetensors") and not name.startswith(("original/", "consolidated"))]
    weights = weights or [name for name in names if fnmatch(name, "pytorch_model*.bin")]
    if weights and variant is None:
        return [*TEXT_FILES, *weights], None
    files = sorted(name for name in names if name.endswith(".gguf") and not Path(name).name.startswith("mmproj"))
    chosen = [name for name in files if variant is None or variant.lower() in name.lower()]
    first = [name for name in chosen if "-of-" not in name or "-00001-of-" in name]
    if not files:
        raise ConfigError(f"model {repository} holds no weights that Pagoda reads: safetensors, GGUF, or pytorch_model.bin")
    if len(first) != 1:
        example = f"{repository}:{Path(files[0]).stem.rpartition('-')[2]}"
        found = ", ".join(files)
        raise ConfigError(
            f"model {repository}: {len(first)} GGUF files fit {variant or 'the name'}; name one, as in {example}. There are {found}"
        )
    return chosen, first[0]


class _Quiet(tqdm):
    """No bar for the question what there is to fetch."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "disable": True})


def _download(hub: Hub, repository: str, revision: str | None, patterns: list[str]) -> Path:
    where: dict[str, Any] = {"revision": revision, "cache_dir": hub.folder, "endpoint": hub.endpoint, "token": hub.token}
    wanted: dict[str, Any] = {"allow_patterns": patterns, "ignore_patterns": list(NOT_WANTED)}
    plan = huggingface_hub.snapshot_download(repository, dry_run=True, tqdm_class=_Quiet, **where, **wanted)
    _check_space(hub, repository, sum(file.file_size or 0 for file in plan if file.will_download))
    return Path(huggingface_hub.snapshot_download(repository, **where, **wanted))


def _check_space(hub: Hub, repository: str, needed: int) -> None:
    existing = next(folder for folder in (hub.folder, *hub.folder.absolute().parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise CapacityError(
            f"model {repository} needs {needed:,} bytes more in {hub.folder}, the disk has {free:,} free;"
            " make room (`pagoda list` shows what is there, `pagoda rm` removes)",
            asked=needed,
            available=free,
        )


@contextmanager
def _told(hub: Hub, repository: str, revision: str | None) -> Iterator[None]:
    """The library's errors in our words. Its own warnings about missing tokens would only repeat them."""
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    try:
        yield
    except errors.GatedRepoError:
        raise ConfigError(f"model {repository} asks for its terms to be accepted; do so on its page, then run: hf auth login") from None
    except errors.RevisionNotFoundError:
        raise ConfigError(f"model {repository} has no revision {revision}; look at its page for branches and tags") from None
    except errors.RepositoryNotFoundError:
        raise ConfigError(f"model {repository} is not on the hub, or is private; check the spelling, or run: hf auth login") from None
    except errors.HFValidationError as error:
        raise ConfigError(f"model {repository} is no valid hub id: {error}") from None
    except (errors.LocalEntryNotFoundError, errors.DryRunError):
        raise ConfigError(f"model {repository} can not be fetched: the hub stopped answering; connect and run it again") from None
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise CapacityError(
            f"the disk became full while fetching {repository}; make room and run it again, it goes on from there"
        ) from None
