"""Does a kernel that claims "capturable" give the same when it is captured, and replayed on other inputs, as when it is run?"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import fields, is_dataclass, replace
from functools import partial
from itertools import count
from typing import Any

import torch
from pagoda.hal.info import DeviceInfo
from pagoda.hal.kernel import Kernel
from pagoda.ops.check import Failure, Report, as_tuple, compare, has_weights, place, planned
from pagoda.ops.op import Case, Op

Capture = Callable[[Hashable, Callable[..., Any], tuple[torch.Tensor, ...]], Callable[[], Any]]
"""`hal.graphs.Graphs.capture`."""


def check_replay(
    kernel: Kernel, op: Op, capture: Capture, *, dtype: str, device: torch.device, info: DeviceInfo, seed: int = 0, limit: int = 4
) -> Report:
    """Capture `kernel` on the first `limit` cases of `op` that it accepts, and on those of replayed steps, change the inputs in place,
    and compare replay with run."""
    report, number = Report(op.name, kernel.name, dtype), count()
    cases = (case for case in op.generate(torch.Generator().manual_seed(seed), dtype) if kernel.refuse(info, case.facts) is None)
    for case in (case for case in cases if _floats(case.args) or _only_ids(case.args)):
        if next(number) >= limit and not _replayed(case):
            continue
        report.ran += 1
        try:
            problem = _check_case(kernel, op, case, capture, device, report)
        except Exception as error:
            problem = f"raised {error!r}"
        if problem is not None:
            report.failures.append(Failure(f"{case.label} {case.facts}", problem))
    return report


def _check_case(kernel: Kernel, op: Op, case: Case, capture: Capture, device: torch.device, report: Report) -> str | None:
    run = kernel.load(case.facts)
    weights = [run.pack({name: tensor.to(device) for name, tensor in case.weights.items()})] if has_weights(op) else []
    changed = replace(case, args=_scaled(case.args) if _floats(case.args) else tuple(ids.flip(0) for ids in case.args))

    def bound(one: Case, plan: Callable[[Any], Any]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        args = list(place(one, device).case.args)
        if one.batch is not None:
            args[one.batch + 1] = plan(args[one.batch])
        return lambda *_: run.run(*weights, *args), tuple(args)

    captured, inputs = bound(case, run.plan)
    replay = capture((op.name, kernel.name, case.label), captured, tuple(_tensors(inputs)))
    if _replayed(case):
        assert case.batch is not None
        run.plan(inputs[case.batch], inputs[case.batch + 1])
    eager, expected_args = bound(changed, partial(planned, run))
    for old, new in zip(_tensors(inputs), _tensors(place(changed, device).case.args), strict=True):
        old.copy_(new)
    found, expected = replay(), eager()
    if expected is None:
        found, expected = (tuple(args[index] for index in case.mutates) for args in (inputs, expected_args))
    for index, (have, want) in enumerate(zip(as_tuple(found), as_tuple(expected), strict=True)):
        problem = compare(have, want.cpu().double() if want.is_floating_point() else want.cpu(), op.tolerance(changed), report)
        if problem is not None:
            return f"replay differs from run, result {index}: {problem}"
    return None


def _replayed(case: Case) -> bool:
    return case.batch is not None and bool(getattr(case.args[case.batch], "replayed", False))


def _scaled(tree: Any) -> Any:
    """The same with floating inputs scaled, so that a stale result shows; lengths, tables and ids stay, for they shape the step."""
    if isinstance(tree, torch.Tensor):
        return tree * 0.75 if tree.dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16) else tree
    if isinstance(tree, tuple):
        return tuple(map(_scaled, tree))
    return tree


def _floats(args: tuple[Any, ...]) -> bool:
    return any(isinstance(arg, torch.Tensor) and arg.is_floating_point() and arg.numel() for arg in args)


def _only_ids(args: tuple[Any, ...]) -> bool:
    """As of a table's rows: in another order they are inputs as good."""
    return all(isinstance(arg, torch.Tensor) and not arg.is_floating_point() and arg.numel() > 1 for arg in args)


def _tensors(args: tuple[Any, ...]) -> list[torch.Tensor]:
    """The tensors of arguments and of records among them, in order; what a plan made is not among a case's arguments."""
    found: list[torch.Tensor] = []
    for arg in args:
        if isinstance(arg, torch.Tensor):
            found.append(arg)
        elif is_dataclass(arg) and not isinstance(arg, type):
            found += _tensors(tuple(getattr(arg, field.name) for field in fields(arg)))
    return found
