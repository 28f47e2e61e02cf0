"""Triton's cache in a folder of ours that can be moved: its index files name files, not places."""

from __future__ import annotations

import json
from pathlib import Path

from triton import knobs
from triton.runtime.cache import FileCacheManager


class MovableCache(FileCacheManager):  # type: ignore[misc]
    """As Triton's own, whose groups of files would hold the paths of the machine that compiled them."""

    def put_group(self, filename: str, group: dict[str, str]) -> str:
        path: str = super().put_group(filename, {name: Path(where).name for name, where in sorted(group.items())})
        return path

    def get_group(self, filename: str) -> dict[str, str] | None:
        path = self.get_file(f"__grp__{filename}")
        if path is None:
            return None
        names = json.loads(Path(path).read_text())["child_paths"]
        found = {name: self.get_file(name) for name in names}
        return {name: where for name, where in found.items() if where is not None}


def use(folder: Path) -> None:
    """Compiled kernels are looked for, and kept, in `folder` from now on, without the texts that lead to them."""
    folder.mkdir(parents=True, exist_ok=True)
    # Triton would put each setting into the environment too, where processes of ours would take it for the user's.
    before, knobs.propagate_env = knobs.propagate_env, False
    try:
        knobs.cache.dir = str(folder)
        knobs.cache.manager_class = MovableCache
        knobs.compilation.store_binary_only = True
    finally:
        knobs.propagate_env = before
