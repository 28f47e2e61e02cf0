"""Where weights come from: `WeightSource`, whatever is behind it (safetensors, GGUF, dummy numbers, a live stream)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, Protocol

from pagoda.models.views import Renamed
from pagoda.quant.format import StoredTensor

Naming = Literal["hf", "pagoda"]
"""Whose tensor names a source speaks: transformers' (the family's rules turn them into ours; GGUF sources translate), or our own."""


class WeightSource(Protocol):
    """The tensors of one checkpoint by name; nothing is read until a tensor's `read`.

    Attributes:
        naming: "hf", or "pagoda" (our own parameter paths, no rules apply: dummy weights).
        tensors: every tensor of every shard.
    """

    naming: Naming

    @property
    def tensors(self) -> Mapping[str, StoredTensor]: ...

    def close(self) -> None:
        """Let go of files; tensors read earlier stay valid. Idempotent."""
        ...


class RenamedSource:
    """Implements `WeightSource`: the tensors of `source` under other names, without those for which `rename` has none."""

    def __init__(self, source: WeightSource, rename: Callable[[str], str | None]) -> None:
        self._source, self._rename, self.naming = source, rename, source.naming

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        names = {name: self._rename(name) for name in self._source.tensors}
        return {new: Renamed(new, self._source.tensors[old]) for old, new in names.items() if new is not None}

    def close(self) -> None:
        self._source.close()
