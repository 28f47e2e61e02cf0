"""Does a kernel do what its primitive says? `check_kernel` runs it over the primitive's cases; conformance level 1 and pytest use it.

Inputs lie between guard zones of NaN, outputs are poisoned before they are written, what must not change is compared bit by
bit, and a claim of batch invariance is put to the test.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, NamedTuple

import torch
from pagoda.hal.info import DeviceInfo
from pagoda.hal.kernel import Kernel, KernelRun
from pagoda.ops.op import DTYPE_EPS, Case, Op

_GUARD = 256
"""Elements of guard zone on each side of an input."""


class Failure(NamedTuple):
    """One case that went wrong, and how."""

    case: str
    problem: str


@dataclass
class Report:
    """What a check found.

    Attributes:
        ran: cases that ran; refused: reason → number of cases that the kernel declines.
        failures: what went wrong; worst: largest error seen, in units of what was allowed.
    """

    op: str
    kernel: str
    dtype: str
    ran: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    worst: float = 0.0

    def joined(self, other: Report) -> Report:
        """Both as one, of other cases of the same kernel in the same dtype."""
        refused = {reason: self.refused.get(reason, 0) + other.refused.get(reason, 0) for reason in {**self.refused, **other.refused}}
        ran, failures, worst = self.ran + other.ran, self.failures + other.failures, max(self.worst, other.worst)
        return Report(self.op, self.kernel, self.dtype, ran, refused, failures, worst)

    def __str__(self) -> str:
        declined = sum(self.refused.values())
        head = f"{self.op}={self.kernel} {self.dtype}: {self.ran} cases, {declined} declined, worst error {self.worst:.2f} of allowed"
        return "\n  ".join([head, *(f"{failure.case}: {failure.problem}" for failure in self.failures[:10])])


class _Place(NamedTuple):
    """Where cases run, and what ends a run there before anybody looks at results."""

    device: torch.device
    settle: Callable[[], None]


def check_kernel(
    kernel: Kernel,
    op: Op,
    *,
    dtype: str = "float32",
    device: torch.device | None = None,
    info: DeviceInfo | None = None,
    seed: int = 0,
    cases: Iterable[Case] | None = None,
    settle: Callable[[], None] = lambda: None,
) -> Report:
    """Run `kernel` over the cases of `op` in `dtype` on `device` (the CPU when not given) and compare with the oracle.

    `info`, where given, decides which cases the kernel declines; `cases`, where given, are tried instead of all that `seed` makes. `settle`
    is called after each run, before results are looked at: a device that records operators makes one program of a run then, and not one for
    each result. Never raises for a kernel's mistakes: they are in the report.
    """
    report = Report(op.name, kernel.name, dtype)
    where = _Place(device or torch.device("cpu"), settle)
    for case in op.generate(torch.Generator().manual_seed(seed), dtype) if cases is None else cases:
        reason = kernel.refuse(info, case.facts) if info else (kernel.accepts(case.facts) if kernel.accepts else None)
        if reason is not None:
            report.refused[reason] = report.refused.get(reason, 0) + 1
            continue
        report.ran += 1
        try:
            problem = _check_case(kernel, op, case, where, report)
        except Exception as error:
            problem = f"raised {error!r}"
        if problem is not None:
            report.failures.append(Failure(f"{case.label} {case.facts}", problem))
    return report


def _check_case(kernel: Kernel, op: Op, case: Case, where: _Place, report: Report) -> str | None:
    run = kernel.load(case.facts)
    weights = [run.pack({name: _Guarded(t, where.device).view for name, t in case.weights.items()})] if has_weights(op) else []
    expected = _truth(op, case)
    for poisoned in (True, False):
        placed = place(case, where.device)
        with _poison(poisoned):
            result = _invoke(run, weights, placed.case, where)
        problem = _judge(result, placed, expected, allowed_error(kernel, op, case), report) or placed.damage(case)
        if problem is not None:
            return problem
        if weights:
            weights = [_repack(run, weights[0], case, where.device)]
    if "batch_invariant" in kernel.claims and not case.mutates:
        return _check_invariance(op, run, weights, case, where)
    return None


def _truth(op: Op, case: Case) -> Any:
    """What the oracle expects. It has a copy of its own: one that writes into its inputs would be compared with what it changed."""
    own = place(case, torch.device("cpu"))
    expected = op.oracle(own.case)
    changed = [index for index, guards in enumerate(own.guards) if any(guard.changed() for guard in guards)]
    assert not changed, f"the oracle of {op.name} changed its inputs {changed}"
    return expected


def has_weights(op: Op) -> bool:
    return "packed" in inspect.signature(getattr(op.reference, "run")).parameters  # noqa: B009 - a callable, not always a class


def allowed_error(kernel: Kernel, op: Op, case: Case) -> float:
    """The primitive's tolerance, scaled where the kernel says that its numbers are coarser than the dtype."""
    return op.tolerance(case) * max(1.0, kernel.eps / DTYPE_EPS[case.facts.dtype])


def _invoke(run: KernelRun, weights: list[Any], case: Case, where: _Place) -> Any:
    args = list(case.args)
    if case.batch is not None:
        args[case.batch + 1] = planned(run, args[case.batch])
    result = run.run(*weights, *args)
    where.settle()
    return result


def planned(run: KernelRun, batch: Any) -> Any:
    """The plan of a step; of one that is replayed as it is planned again after it was captured."""
    plan = run.plan(batch)
    return run.plan(batch, plan) if getattr(batch, "replayed", False) else plan


def _repack(run: KernelRun, packed: Any, case: Case, device: torch.device) -> Any:
    return run.pack({name: tensor.to(device) for name, tensor in case.weights.items()}, out=packed)


def _check_invariance(op: Op, run: KernelRun, weights: list[Any], case: Case, where: _Place) -> str | None:
    whole = as_tuple(_invoke(run, weights, place(case, where.device).case, where))
    for part in op.split(case):
        alone = as_tuple(_invoke(run, weights, place(part.case, where.device).case, where))
        for a, b in zip(whole, alone, strict=True):
            if a is not None and not torch.equal(a.cpu()[part.rows].nan_to_num(), b.cpu().nan_to_num()):
                return f"claims batch invariance, but differs as {part.case.label}"
    return None


class _Guarded:
    """A copy of a tensor, strides kept, between guard zones; knows whether anything outside its elements changed."""

    def __init__(self, source: torch.Tensor, device: torch.device) -> None:
        span = 1 + sum((n - 1) * s for n, s in zip(source.shape, source.stride(), strict=True)) if source.numel() else 0
        fill = float("nan") if source.is_floating_point() else (True if source.dtype == torch.bool else -1)
        fill = 255 if source.dtype == torch.uint8 else fill
        buffer = torch.full((span + 2 * _GUARD,), fill, dtype=source.dtype)
        buffer.as_strided(source.shape, source.stride(), _GUARD).copy_(source)
        self.buffer, self.before = buffer.to(device, copy=True), buffer
        self._where = (source.shape, source.stride(), _GUARD)
        self.view = self.buffer.as_strided(*self._where)

    def changed_outside(self) -> bool:
        now = self.buffer.cpu().clone()
        now.as_strided(*self._where).copy_(self.before.as_strided(*self._where))
        return not _same_bits(now, self.before)

    def changed(self, clears: bool = False) -> bool:
        """`clears`: but for zeros in the place of NaN."""
        now = self.buffer.cpu()
        if clears and now.is_floating_point() and not self.changed_outside():
            now = torch.where(self.before.isnan() & (now == 0), self.before, now)
        return not _same_bits(now, self.before)


class _Placed(NamedTuple):
    """A case on the device, and every guarded tensor of each argument."""

    case: Case
    guards: tuple[tuple[_Guarded, ...], ...]

    def damage(self, case: Case) -> str | None:
        for index, guards in enumerate(self.guards):
            writable = index in case.mutates or index in case.consumes
            for guard in guards:
                if guard.changed_outside() if writable else guard.changed(index in case.clears):
                    return f"wrote outside its tensor, argument {index}" if writable else f"changed input {index}"
        return None


def place(case: Case, device: torch.device) -> _Placed:
    args, guards = [], []
    for arg in case.args:
        mine: list[_Guarded] = []
        args.append(_place_one(arg, device, mine))
        guards.append(tuple(mine))
    return _Placed(replace(case, args=tuple(args)), tuple(guards))


def _place_one(arg: Any, device: torch.device, guards: list[_Guarded]) -> Any:
    if isinstance(arg, torch.Tensor):
        guards.append(_Guarded(arg, device))
        return guards[-1].view
    if is_dataclass(arg) and not isinstance(arg, type):
        return replace(arg, **{f.name: _place_one(getattr(arg, f.name), device, guards) for f in fields(arg)})
    return arg


def _judge(result: Any, placed: _Placed, expected: Any, allowed: float, report: Report) -> str | None:
    pairs = paired(result, tuple(placed.case.args[i] for i in placed.case.mutates), expected, placed.case.facts.dtype)
    if isinstance(pairs, str):
        return pairs
    for index, (have, want, rounding) in enumerate(pairs):
        problem = compare(have, want, allowed + rounding, report)
        if problem is not None:
            return f"result {index}: {problem}"
    return None


class Pair(NamedTuple):
    """A result, what the oracle expects there, and the error that comes of where it is kept, beyond the primitive's tolerance."""

    have: torch.Tensor
    want: torch.Tensor
    rounding: float


def paired(result: Any, written: tuple[torch.Tensor, ...], expected: Any, dtype: str) -> list[Pair] | str:
    """Each result (what was returned, then what was `written` in place) with what the oracle expects there; or why they do not pair.

    `dtype`: that the primitive computes in."""
    given = () if result is None and written else as_tuple(result)
    wanted = as_tuple(expected)
    # Of what is written in place, NaN in the oracle is a place that nobody looks at.
    left = [torch.where(want.isnan(), 0.0, have.detach().cpu()) for have, want in zip(written, wanted[len(given) :], strict=False)]
    got = given if len(given) == len(wanted) else (*given, *left)
    if len(got) != len(wanted):
        return f"returned {len(got)} results, not {len(wanted)}"
    return [
        Pair(have, want, _rounding(have, dtype) if i >= len(given) else 0.0) for i, (have, want) in enumerate(zip(got, wanted, strict=True))
    ]


def _rounding(kept: torch.Tensor, dtype: str) -> float:
    """Half a unit of float32 where states are kept in it and float64 is computed; tolerances count what narrower dtypes lose."""
    return DTYPE_EPS["float32"] / 2 if dtype == "float64" and kept.dtype == torch.float32 else 0.0


def compare(have: torch.Tensor, want: torch.Tensor, allowed: float, report: Report) -> str | None:
    have = have.detach().cpu()
    if have.shape != want.shape:
        return f"shape {tuple(have.shape)}, not {tuple(want.shape)}"
    if not want.is_floating_point():
        wrong = (have != want).sum().item()
        return f"{wrong} of {want.numel()} integers are wrong" if wrong else None
    free, infinite = want.isnan(), want.isinf()
    have = have.double()
    if not have[~infinite].isfinite().all():
        return f"{int((~have[~infinite].isfinite()).sum())} numbers are not finite"
    if not torch.equal(have[infinite], want[infinite]):
        return "infinities differ"
    have, want = have[~free & ~infinite], want[~free & ~infinite]
    error = float((have - want).abs().max() / want.abs().max().clamp(min=1e-30)) if want.numel() else 0.0
    report.worst = max(report.worst, error / allowed if allowed else error)
    return f"error {error:.3g}, allowed {allowed:.3g}" if error > allowed else None


def as_tuple(result: Any) -> tuple[Any, ...]:
    return result if isinstance(result, tuple) else (result,)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@contextmanager
def _poison(on: bool) -> Iterator[None]:
    """Fresh tensors are filled with NaN or the largest integer, so that what a kernel forgets to write shows."""
    before, warn = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(on or before, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before, warn_only=warn)
