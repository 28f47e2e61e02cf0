"""Recorded steps: a decode step's kernel calls and torch calls are written down once and run again without Python between them.

Native kernels record themselves in C++ (`Program`); a dispatch mode sees everything else that torch computes and keeps it as a call
to be repeated into the same result. Views and fresh memory need no repetition. A step that looks at a value on the host cannot be
recorded and runs as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from pagoda.backends.torch_host.graphs import EagerReplay
from pagoda.hal.errors import DeviceError
from pagoda.hal.graphs import GraphPolicy, Replay
from pagoda.ops.native.library import Program
from torch.utils._python_dispatch import TorchDispatchMode

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 28, 32)
"""Decode sizes that are recorded. In larger steps Python's share is small, and their memory would be kept for nothing."""

_FRESH = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
"""Functions whose result has no content."""

_LOOKS = {"_local_scalar_dense", "is_nonzero", "item", "equal", "nonzero", "masked_select", "unique_dim", "_unique2"}
"""Functions whose result is a host value, or has a shape that depends on values."""


class Unrecordable(Exception):
    """The step looked at a value."""


class RecordedGraphs:
    """Graphs of a CPU with the native library."""

    def __init__(self) -> None:
        self.policy = GraphPolicy("captured", ROWS, ROWS, at_start=False)

    def capture(self, key: Hashable, fn: Callable[..., Any], inputs: tuple[torch.Tensor, ...]) -> Replay:
        try:
            return RecordedReplay(fn, inputs)
        except Unrecordable:
            return EagerReplay(fn, inputs)
        except RuntimeError as error:
            raise DeviceError(f"step {key} could not be made replayable: {error}") from error


class RecordedReplay:
    """A recorded step; runs once while it is made."""

    def __init__(self, fn: Callable[..., Any], inputs: tuple[torch.Tensor, ...]) -> None:
        self._program = Program()
        recorder = _Recorder(self._program)
        with self._program, recorder:
            self._outputs = fn(*inputs)
        recorder.cut()
        self._steps = recorder.steps
        # Addresses are all that native calls keep: the rest is kept here, with what the step itself holds.
        self._kept = (fn, inputs, recorder.kept)
        self.nbytes = sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in recorder.made}.values())

    def __call__(self) -> Any:
        for step in self._steps:
            step()
        return self._outputs


class _Recorder(TorchDispatchMode):
    def __init__(self, program: Program) -> None:
        super().__init__()
        self._program = program
        self._done = 0
        self.steps: list[Callable[[], object]] = []
        self.kept: list[Any] = []
        self.made: list[torch.Tensor] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Otherwise torch imports its compiler at the first call, 70 MiB of it, only to switch it off for this class.
        return False

    def cut(self) -> None:
        """End the current run of native calls."""
        first, last = self._done, len(self._program)
        if last > first:
            self.steps.append(lambda: self._program.replay(first, last))
        self._done = last

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name in _LOOKS:
            raise Unrecordable(name)
        result = func(*args, **kwargs)
        self.kept.append((args, kwargs, result))
        outputs = [x for x in _flat(result) if isinstance(x, torch.Tensor)]
        if func._schema.is_mutable:
            self._repeat(lambda: func(*args, **kwargs))
        elif name not in _FRESH and not _views(outputs, args, kwargs):
            self.made += outputs
            self._repeat(lambda: _again(func, args, kwargs, outputs))
        else:
            self.made += outputs if name in _FRESH else []
        return result

    def _repeat(self, call: Callable[[], object]) -> None:
        self.cut()
        self.steps.append(call)


def _again(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: list[torch.Tensor]) -> None:
    fresh = [x for x in _flat(func(*args, **kwargs)) if isinstance(x, torch.Tensor)]
    for old, new in zip(outputs, fresh, strict=True):
        old.copy_(new)


def _views(outputs: list[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether every result lies in the memory of an argument."""
    given = {x.untyped_storage().data_ptr() for x in _flat((args, tuple(kwargs.values()))) if isinstance(x, torch.Tensor) and x.numel()}
    return all(not x.numel() or x.untyped_storage().data_ptr() in given for x in outputs)


def _flat(tree: Any) -> list[Any]:
    if isinstance(tree, tuple | list):
        return [leaf for part in tree for leaf in _flat(part)]
    return [tree]
