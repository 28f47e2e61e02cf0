"""The call log: every primitive's name, kernel, shapes and dtypes as it runs; further levels add statistics and look for NaN.

A table that has none binds kernels as they are, so the log costs nothing where it is off.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any, Literal

import torch
from pagoda.hal.errors import DeviceError
from pagoda.hal.kernel import KernelRun
from pagoda.hal.table import Choice

Level = Literal["calls", "statistics", "nan"]
"""What is said of each call. "statistics" adds mean, deviation and extremes of the results, "nan" instead stops at the first result that
holds NaN or infinity where no input did; both wait for the device at every call."""

_UNWRITTEN = frozenset({"paged_attention", "write_kv"})
"""Primitives whose pages hold whatever was there before: their inputs are not judged."""


def wrapper(level: Level, say: Callable[[str], None]) -> Callable[[Choice, KernelRun], KernelRun]:
    """For `KernelTable(wrap=…)`: each kernel that it resolves tells `say` of its calls."""
    return lambda choice, run: _Logged(choice, run, level, say)


class _Logged:
    def __init__(self, choice: Choice, run: KernelRun, level: Level, say: Callable[[str], None]) -> None:
        self._choice, self._inner, self._level, self._say = choice, run, level, say
        self.pack, self.plan = run.pack, run.plan

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        inputs = _tensors((args, kwargs))
        name = f"{self._choice.op}={self._choice.chosen.name}"
        clean = self._level == "nan" and self._choice.op not in _UNWRITTEN and all(map(_finite, inputs))
        shapes = " ".join(map(_shape, inputs))
        result = self._inner.run(*args, **kwargs)
        outputs = _tensors(result)
        tail = "".join(f" {_statistics(x)}" for x in outputs) if self._level == "statistics" else ""
        self._say(f"{name} {shapes} → {' '.join(map(_shape, outputs)) or 'in place'}{tail}")
        if clean and not all(map(_finite, outputs)):
            raise DeviceError(f"{name} made NaN or infinity of finite inputs ({shapes}); {self._choice.facts}; try another kernel for it")
        return result


def _tensors(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, dict):
        return [x for part in tree.values() for x in _tensors(part)]
    if isinstance(tree, tuple | list):
        return [x for part in tree for x in _tensors(part)]
    if is_dataclass(tree) and not isinstance(tree, type):
        return [x for entry in fields(tree) for x in _tensors(getattr(tree, entry.name))]
    return []


def _shape(x: torch.Tensor) -> str:
    where = "" if x.device.type == "cpu" else f"@{x.device}"
    return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}{where}"


def _finite(x: torch.Tensor) -> bool:
    return not x.is_floating_point() or bool(x.isfinite().all())


def _statistics(x: torch.Tensor) -> str:
    if not x.numel():
        return "(empty)"
    wide = x.double()
    spread = wide.std(correction=0).item()
    bad = x.numel() - int(wide.isfinite().sum())
    mean, least, most = wide.mean().item(), wide.min().item(), wide.max().item()
    tail = f", {bad} not finite" if bad else ""
    return f"(mean {mean:.4g} deviation {spread:.4g} min {least:.4g} max {most:.4g}{tail})"
