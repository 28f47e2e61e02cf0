"""Judges calls of primitives as a model makes them: each result against the float64 oracle on the very inputs that the call got."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, NamedTuple

import torch
from pagoda.hal.kernel import Kernel, KernelRun
from pagoda.hal.table import Choice
from pagoda.ops.check import Report, allowed_error, as_tuple, compare, has_weights, paired
from pagoda.ops.op import Case, Op
from pagoda.ops.registry import ALL_OPS


class Verdict(NamedTuple):
    """One call.

    Attributes:
        kernel: the record that was chosen. facts: of its use.
        inputs: dtypes and shapes.
        problem: what is wrong, None where the result is within the primitive's tolerance.
        error: the largest, relative to the oracle's largest number. allowed: largest that is tolerated.
    """

    kernel: Kernel
    facts: Any
    inputs: str
    problem: str | None
    error: float
    allowed: float


class CallJudge:
    """Wraps the kernels of one table (`KernelTable(wrap=judge.wrap)`); while `active`, `tell` gets a verdict on every call.

    Keeps the weights that kernels packed, as they were given, for the oracle.
    """

    def __init__(self, tell: Callable[[Verdict], None]) -> None:
        self.active = False
        self.tell = tell
        self._weights: dict[int, tuple[Any, Mapping[str, torch.Tensor]]] = {}

    def wrap(self, choice: Choice, run: KernelRun) -> KernelRun:
        return _Judged(choice, run, self)

    def keep(self, packed: Any, weights: Mapping[str, torch.Tensor]) -> Any:
        self._weights[id(packed)] = (packed, weights)
        return packed

    def weights_of(self, packed: Any) -> Mapping[str, torch.Tensor]:
        return self._weights[id(packed)][1]

    def packed_with(self, op: Op, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Mapping[str, torch.Tensor]:
        """The weights of a call of `run`; none where the primitive has none."""
        return self.weights_of(args[0] if args else kwargs["packed"]) if has_weights(op) else {}


class _Judged:
    def __init__(self, choice: Choice, run: KernelRun, judge: CallJudge) -> None:
        self._choice, self._inner, self._judge = choice, run, judge
        self.plan = run.plan
        self._op = ALL_OPS[choice.op]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def pack(self, weights: Mapping[str, torch.Tensor], out: Any | None = None) -> Any:
        return self._judge.keep(self._inner.pack(weights, out), dict(weights))

    def share(self, packed: Any) -> Any:
        inner: Any = self._inner
        return self._judge.keep(inner.share(packed), self._judge.weights_of(packed))

    def run(self, *args: Any, **kwargs: Any) -> Any:
        if not self._judge.active:
            return self._inner.run(*args, **kwargs)
        case = _case(self._op, self._choice.facts, self._judge.packed_with(self._op, args, kwargs))
        given = _inputs(self._op, args, kwargs, case)
        result = self._inner.run(*args, **kwargs)
        if given is not None:
            written = tuple(_to_host(_bound(self._op, args, kwargs)[index]) for index in case.mutates)
            self._judge.tell(_verdict(self._op, self._choice, replace(case, args=given), _to_host(result), written))
        return result


def _verdict(op: Op, choice: Choice, case: Case, result: Any, written: tuple[torch.Tensor, ...]) -> Verdict:
    shapes = " ".join(f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}" for x in _tensors(case.args))
    allowed, report = allowed_error(choice.chosen, op, case), Report(op.name, choice.chosen.name, case.facts.dtype)
    pairs = paired(result, written, op.oracle(case), case.facts.dtype)
    problem = pairs if isinstance(pairs, str) else None
    for index, (have, want, rounding) in enumerate(pairs if isinstance(pairs, list) else []):
        found = compare(have, want, allowed + rounding, report)
        if found is not None:
            problem = f"result {index}: {found}, worst at {_worst_at(have, want)} of {list(want.shape)}"
            break
    return Verdict(choice.chosen, choice.facts, shapes, problem, report.worst * (allowed or 1.0), allowed)


def _worst_at(have: torch.Tensor, want: torch.Tensor) -> list[int]:
    if have.shape != want.shape or not want.numel():
        return []
    off = (have.double() - want.double()).abs().nan_to_num(nan=torch.inf)
    off = torch.where(want.isnan(), 0.0, off) if want.is_floating_point() else off
    return [int(i) for i in torch.unravel_index(off.argmax(), off.shape)]


def _case(op: Op, facts: Any, weights: Mapping[str, torch.Tensor]) -> Case:
    """The call as a case, without its inputs."""
    example = next(iter(op.generate(torch.Generator().manual_seed(0), "float32")))
    return Case("as called", facts, example.args, _to_host(dict(weights)), example.mutates, example.batch, example.consumes)


def _inputs(op: Op, args: tuple[Any, ...], kwargs: Mapping[str, Any], case: Case) -> tuple[Any, ...] | None:
    """Copies of the inputs, as the oracle takes them; None where it does not know one of them."""
    bound = list(_bound(op, args, kwargs))
    if case.batch is not None:
        bound[case.batch + 1] = None  # what `plan` made is the kernel's own affair
    known = len(case.args)
    return _to_host(tuple(bound[:known])) if all(extra is None for extra in bound[known:]) else None


def _bound(op: Op, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """The inputs after the packed weights by the primitive's own signature, with its defaults."""
    bound = inspect.signature(getattr(op.reference, "run")).bind(None, *args, **kwargs)  # noqa: B009 - a callable, not always a class
    bound.apply_defaults()
    return tuple(bound.arguments.values())[2 if has_weights(op) else 1 :]


def _to_host(tree: Any) -> Any:
    """A copy on the host that nothing writes to."""
    if isinstance(tree, torch.Tensor):
        return tree.detach().to("cpu", copy=True)
    if isinstance(tree, dict):
        return {name: _to_host(part) for name, part in tree.items()}
    if isinstance(tree, tuple) and not hasattr(tree, "_fields"):
        return tuple(map(_to_host, tree))
    if is_dataclass(tree) and not isinstance(tree, type):
        return replace(tree, **{entry.name: _to_host(getattr(tree, entry.name)) for entry in fields(tree)})
    return tree


def _tensors(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, tuple):
        return [x for part in as_tuple(tree) for x in _tensors(part)]
    if is_dataclass(tree) and not isinstance(tree, type):
        return [x for entry in fields(tree) for x in _tensors(getattr(tree, entry.name))]
    return []
