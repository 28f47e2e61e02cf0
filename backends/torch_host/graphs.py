"""Eager steps: a replay runs the callable again and keeps handing back the same output objects."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

import torch
from pagoda.hal.errors import DeviceError
from pagoda.hal.graphs import GraphPolicy, Replay

T = TypeVar("T")


class EagerReplay:
    """`fn(*inputs)`, run on each call."""

    def __init__(self, fn: Callable[..., Any], inputs: tuple[torch.Tensor, ...]) -> None:
        self._fn = fn
        self._inputs = inputs
        self._outputs = fn(*inputs)
        self.nbytes = sum(tensor.nbytes for tensor in tensors(self._outputs))

    def __call__(self) -> Any:
        put_into(self._outputs, self._fn(*self._inputs))
        return self._outputs


class EagerGraphs:
    """No capture: any size runs as it is, and so does what is cut out."""

    def __init__(self, policy: GraphPolicy | None = None) -> None:
        self.policy = policy or GraphPolicy()

    def capture(self, key: Hashable, fn: Callable[..., Any], inputs: tuple[torch.Tensor, ...]) -> Replay:
        try:
            return EagerReplay(fn, inputs)
        except RuntimeError as error:
            raise DeviceError(f"step {key} could not be made replayable: {error}") from error

    def cut(self, work: Callable[[], T]) -> T:
        """See `hal.graphs.Pieces`."""
        return work()


def tensors(tree: Any) -> list[torch.Tensor]:
    """The tensors in nested tuples, lists, dicts and records, in order."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    return [tensor for part in parts(tree) for tensor in tensors(part)]


def parts(tree: Any) -> list[Any]:
    """The members of one tuple, list, dict or record; nothing for a leaf."""
    if isinstance(tree, tuple | list):
        return list(tree)
    if isinstance(tree, dict):
        return list(tree.values())
    if is_dataclass(tree) and not isinstance(tree, type):
        return [getattr(tree, entry.name) for entry in fields(tree)]
    return [getattr(tree, name) for name in getattr(type(tree), "__slots__", ())]


def put_into(kept: Any, fresh: Any) -> None:
    """Write the tensors of a result where those of an earlier one lie. Raises `DeviceError` where their shapes differ."""
    olds, news = tensors(kept), tensors(fresh)
    if [tensor.shape for tensor in olds] != [tensor.shape for tensor in news]:
        raise DeviceError(
            f"a replayed step gave shapes {[tuple(t.shape) for t in news]} where it first gave {[tuple(t.shape) for t in olds]};"
            " a step's shapes must depend on its bucket alone"
        )
    for old, new in zip(olds, news, strict=True):
        if old.data_ptr() != new.data_ptr():
            old.copy_(new)
