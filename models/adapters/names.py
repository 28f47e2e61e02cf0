"""From the modules that an adapter names to slices of our linear layers: the checkpoint's own rules, run on places instead of numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from pagoda.hal.errors import CheckpointError
from pagoda.models.builder import Part
from pagoda.models.checkpoint import Rule, apply
from pagoda.models.views import Transposed
from pagoda.quant.format import StoredTensor


class Slice(NamedTuple):
    """Which outputs and inputs of a module, in order, are one of our slices: int64 indices, of this rank."""

    rows: torch.Tensor
    columns: torch.Tensor


def slices_of(module: str, shape: tuple[int, int], rules: Sequence[Rule], adaptable: Mapping[str, Part]) -> dict[str, Slice]:
    """Our slices, by path, of the module whose weight is `shape` [outputs, inputs] for the adapter.

    Raises `CheckpointError` for a module that the model lacks, or has in another shape.
    """
    found = {}
    for name, (rows, columns) in _tensors(module, shape, rules).items():
        path = name.removesuffix(".weight")
        part = adaptable.get(path)
        if part is None:
            raise CheckpointError(f"{module}: {_why(module, path, adaptable)}")
        have, want = [rows.shape[0], rows.shape[1]], [part.rows.total, part.columns.total]
        if have != want:
            raise CheckpointError(f"{module} changes a weight of shape {have}, the model's {path} has {want}: it is of another model")
        row_part, column_part = part.rows.index, part.columns.index
        found[path] = Slice(rows.read((row_part, slice(0, 1)))[:, 0], columns.read((slice(0, 1), column_part))[0])
    if not found:
        raise CheckpointError(f"{module}: {_why(module, 'head', adaptable)}")
    return found


@dataclass(frozen=True)
class _Places:
    """A stored tensor whose numbers are their own places along `axis`."""

    name: str
    shape: tuple[int, ...]
    axis: int
    dtype: str = "int64"

    def read(self, index: tuple[slice, ...] = ()) -> torch.Tensor:
        bounds = [part.indices(size)[:2] for part, size in zip((*index, slice(None), slice(None)), self.shape)]
        places = torch.arange(*bounds[self.axis])
        return places.unsqueeze(1 - self.axis).expand([stop - start for start, stop in bounds])


def _tensors(module: str, shape: tuple[int, int], rules: Sequence[Rule]) -> dict[str, tuple[StoredTensor, StoredTensor]]:
    """Places of rows and of columns by the names that the rules lead to; stored as it is, or turned (where the rules turn it back)."""
    failed = None
    for turned in (False, True):
        stored, rows = shape[::-1] if turned else shape, int(turned)
        try:
            ways = [apply(rules, {f"{module}.weight": _Places(module, stored, axis)}) for axis in (rows, 1 - rows)]
            if all(_is_turned(tensor) == turned and len(tensor.shape) == 2 for tensor in ways[0].values()):
                return {name: (tensor, ways[1][name]) for name, tensor in ways[0].items()}
        except CheckpointError as error:
            failed = error
    raise CheckpointError(f"{module} changes a weight of shape {list(shape)}, which the model does not have: {failed}")


def _is_turned(tensor: Any) -> bool:
    turned = False
    while hasattr(tensor, "base"):
        turned ^= isinstance(tensor, Transposed)
        tensor = tensor.base
    return turned


def _why(module: str, path: str, adaptable: Mapping[str, Part]) -> str:
    if path.split(".")[0] in ("head", "embed"):
        return "adapters of the embedding and of the head are not supported; train without them, or merge the adapter into its model"
    if ".experts." in f"{module}.":
        return "adapters of routed experts are not supported; train without them, or merge the adapter into its model"
    last = sorted({name.rpartition(".")[2] for name in adaptable})
    return f"the model has no such linear layer; there are {', '.join(last)} in its layers"
