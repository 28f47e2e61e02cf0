"""Recorded steps: a decode step's kernel calls and torch calls are written down once and run again without Python between them.

Native kernels record themselves in C++ (`Program`); a dispatch mode sees everything else that torch computes and keeps it as a call
to be repeated into the same result. Views and fresh memory need no repetition. A step that looks at a value on the host cannot be
recorded and runs as it is.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Hashable
from typing import Any

import torch
from pagoda.backends.cpu.workspace import Taken, Workspace
from pagoda.backends.torch_host.graphs import EagerReplay
from pagoda.hal.errors import DeviceError
from pagoda.hal.graphs import GraphPolicy, Replay
from pagoda.ops.native.library import Program
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 28, 32)
"""Decode sizes that are recorded. In larger steps Python's share is small."""

TOKENS = (4, 8, 12, 16, 20, 24, 28, 32, 40, 48, 64)
"""Tokens of recorded steps with prompts: what is new behind a cached beginning, and decodes beside it."""

_FRESH = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
"""Functions whose result has no content."""

_LOOKS = {"_local_scalar_dense", "is_nonzero", "item", "equal", "nonzero", "masked_select", "unique_dim", "_unique2"}
"""Functions whose result is a host value, or has a shape that depends on values."""


class Escaped(Exception):
    """The step put a tensor that it made where a later step may look for it."""


class Unrecordable(Exception):
    """The step looked at a value."""


class RecordedGraphs:
    """Graphs of a CPU with the native library. One thread at a time runs steps: all share the memory of what they drop."""

    def __init__(self) -> None:
        self.policy = GraphPolicy("captured", ROWS, ROWS, at_start=False, prompt_tokens=TOKENS, prompt_rows=ROWS)
        self._shared: weakref.ref[Workspace] | None = None

    def capture(self, key: Hashable, fn: Callable[..., Any], inputs: tuple[torch.Tensor, ...]) -> Replay:
        workspace = (self._shared and self._shared()) or Workspace()
        self._shared = weakref.ref(workspace)
        try:
            try:
                return RecordedReplay(fn, inputs, workspace)
            except Escaped:
                return RecordedReplay(fn, inputs)
        except Unrecordable:
            return EagerReplay(fn, inputs)
        except RuntimeError as error:
            raise DeviceError(f"step {key} could not be made replayable: {error}") from error


class RecordedReplay:
    """A recorded step; runs once while it is made. What it drops lies in `workspace`, or in memory of its own where there is none."""

    def __init__(self, fn: Callable[..., Any], inputs: tuple[torch.Tensor, ...], workspace: Workspace | None = None) -> None:
        self._program = Program()
        recorder = _Recorder(self._program, Taken(workspace) if workspace is not None else None)
        with self._program, recorder:
            outputs = fn(*inputs)
        self._outputs = recorder.keep(outputs)
        del outputs
        recorder.end()
        self._steps = recorder.steps
        # Addresses are all that native calls keep: the rest is kept here, with what the step itself holds.
        self._kept = (fn, inputs, workspace, recorder.kept)
        self.nbytes = sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in recorder.made}.values())

    def __call__(self) -> Any:
        for step in self._steps:
            step()
        return self._outputs


class _Recorder(TorchDispatchMode):
    """Attributes:
    steps: what a replay calls. kept: what their addresses need beside the workspace. made: memory of this step alone.
    """

    def __init__(self, program: Program, taken: Taken | None) -> None:
        super().__init__()
        self._program, self._taken = program, taken
        self._done = 0
        self.steps: list[Callable[[], object]] = []
        self.kept: list[torch.Tensor] = []
        self.made: list[torch.Tensor] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Otherwise torch imports its compiler at the first call, 70 MiB of it, only to switch it off for this class.
        return False

    def cut(self) -> None:
        """End the current run of native calls."""
        first, last, program = self._done, len(self._program), self._program
        if last > first:
            self.steps.append(lambda: program.replay(first, last))
        self._done = last

    def keep(self, outputs: Any) -> Any:
        """The step's results, those that lie in the workspace copied out of it, so that no other step writes over them."""
        self.cut()
        return tree_map_only(torch.Tensor, self._own, outputs)

    def end(self) -> None:
        """Raises `Escaped` where somebody outside still holds what another step would write over."""
        if self._taken:
            gc.collect()
        if self._taken:
            raise Escaped(f"{len(self._taken)} tensors")

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name in _LOOKS:
            raise Unrecordable(name)
        result = func(*args, **kwargs)
        outputs = [x for x in _flat(result) if isinstance(x, torch.Tensor)]
        fresh = name in _FRESH
        if not func._schema.is_mutable and (fresh or not _views(outputs, args, kwargs)):
            result = tree_map_only(torch.Tensor, lambda x: self._placed(x, content=not fresh), result)
        self._hold((args, tuple(kwargs.values()), result))
        if func._schema.is_mutable:
            args, kwargs = self._named(args), self._named(kwargs)
            self._repeat(lambda: func(*args, **kwargs))
        elif not fresh and not _views(outputs, args, kwargs):
            args, kwargs, ours = self._named(args), self._named(kwargs), _flat(self._named(result))
            self._repeat(lambda: _again(func, args, kwargs, ours))
        return result

    def _placed(self, x: torch.Tensor, content: bool) -> torch.Tensor:
        """A result where a replay will put it."""
        # Bytes are structures that the host writes while a step is planned: nobody would write them again.
        if self._taken is None or x.dtype is torch.uint8 or not x.numel() or x.layout is not torch.strided:
            self.made.append(x)
            return x
        mine = self._taken.like(x)
        return mine.copy_(x) if content else mine

    def _own(self, x: torch.Tensor) -> torch.Tensor:
        if self._taken is None or not self._taken.holds(x):
            return x
        mine, there = x.clone(), self._taken.named(x)
        self.made.append(mine)
        self.steps.append(lambda: mine.copy_(there))
        return mine

    def _hold(self, tree: Any) -> None:
        tensors = (x for x in _flat(tree) if isinstance(x, torch.Tensor))
        self.kept += [x for x in tensors if self._taken is None or not self._taken.holds(x)]

    def _named(self, tree: Any) -> Any:
        return tree if self._taken is None else tree_map_only(torch.Tensor, self._taken.named, tree)

    def _repeat(self, call: Callable[[], object]) -> None:
        self.cut()
        self.steps.append(call)


def _again(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: list[Any]) -> None:
    fresh = _flat(func(*args, **kwargs))
    for old, new in zip(outputs, fresh, strict=True):
        if isinstance(old, torch.Tensor):
            old.copy_(new)


def _views(outputs: list[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether every result lies in the memory of an argument."""
    given = {x.untyped_storage().data_ptr() for x in _flat((args, tuple(kwargs.values()))) if isinstance(x, torch.Tensor) and x.numel()}
    return all(not x.numel() or x.untyped_storage().data_ptr() in given for x in outputs)


def _flat(tree: Any) -> list[Any]:
    if isinstance(tree, tuple | list):
        return [leaf for part in tree for leaf in _flat(part)]
    return [tree]
