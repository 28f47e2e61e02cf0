"""The store of pages that a configuration asks for: a shelf for each rank, and the connector that knows what is on them."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import torch
from pagoda.hal.device import Device
from pagoda.hal.errors import CapacityError
from pagoda.hal.kv import CacheGroup
from pagoda.hal.stream import Stream
from pagoda.serving.engine.groups import GroupRule, hash_unit
from pagoda.serving.engine.transfer.catalog import Catalog, DiskCatalog, HostCatalog
from pagoda.serving.engine.transfer.config import Disk, HostMemory, Storage
from pagoda.serving.engine.transfer.shelves import DiskShelf, HostShelf, Shelf
from pagoda.serving.engine.transfer.store import Post, StoreConnector


@dataclass(frozen=True)
class StoreSpec:
    """A storage for a loaded model.

    Attributes:
        groups: of the pool. identity: of everything that makes a page's bytes: files of another model or layout are not looked at.
        world: ranks, which share host memory's bytes.
    """

    storage: Storage
    groups: tuple[CacheGroup, ...]
    identity: str
    world: int

    @property
    def pages_per_unit(self) -> int:
        """Of all groups."""
        rules = [GroupRule.of(group) for group in self.groups]
        return sum(hash_unit(rules) // rule.tokens_per_page for rule in rules)

    def units(self, nbytes: int) -> int:
        """How many units so many bytes hold. Raises `CapacityError` for none."""
        unit = self.pages_per_unit * self.groups[0].page_bytes * self.world
        if nbytes < unit:
            raise CapacityError(
                f"a store of {nbytes} bytes holds no unit of {unit} bytes (KV pages of one prefix step, all ranks): give it more",
                asked=unit,
                available=nbytes,
            )
        return nbytes // unit

    def folder(self, root: str, rank: int) -> Path:
        return Path(root).expanduser() / self.identity / f"rank{rank}of{self.world}"


def make_shelf(spec: StoreSpec, device: Device, stream: Stream, pool: torch.Tensor, rank: int) -> Shelf:
    """The part of one rank; `pool` is `[num_pages, page_bytes]`."""
    match spec.storage:
        case HostMemory(nbytes):
            return HostShelf(device, pool, spec.units(nbytes), spec.pages_per_unit)
        case Disk(folder):
            return DiskShelf(device, stream, pool, spec.pages_per_unit, spec.folder(folder, rank))


def make_connector(spec: StoreSpec, post: Post) -> StoreConnector:
    catalog: Catalog
    match spec.storage:
        case HostMemory(nbytes):
            catalog = HostCatalog(spec.units(nbytes))
        case Disk(folder):
            catalog = DiskCatalog(spec.folder(folder, 0))
    return StoreConnector(catalog, post, keeps=isinstance(spec.storage, Disk))


def identity_of(*facts: object) -> str:
    """A short name for a set of facts, the same in every process."""
    return blake2b(repr(facts).encode(), digest_size=8).hexdigest()


def files_of(model: Path) -> tuple[tuple[str, int, int], ...]:
    """Names, sizes and times of a model's files: another checkpoint in the same place is another model."""
    files = [model] if model.is_file() else sorted(path for path in model.iterdir() if path.is_file())
    return tuple((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files)
