"""Resolution: which kernel each use of a primitive gets on a device, once, with the reasons kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from pagoda.hal.errors import KernelError
from pagoda.hal.info import DeviceInfo
from pagoda.hal.kernel import Facts, Kernel, KernelRun, Reason


@dataclass(frozen=True)
class Choice:
    """One resolved use: what was chosen, and why each other candidate was passed over."""

    op: str
    facts: Facts
    chosen: Kernel
    passed_over: tuple[tuple[Kernel, Reason], ...] = ()


@dataclass(frozen=True)
class KernelPolicy:
    """How to choose.

    Attributes:
        explicit: op → kernel name that must be used (`--kernel attention=flashinfer`); unfit is an error.
        strict: falling back to a reference is an error (`--strict-kernels`).
        batch_invariant: only kernels that claim "batch_invariant".
    """

    explicit: Mapping[str, str] = field(default_factory=dict)
    strict: bool = False
    batch_invariant: bool = False


class KernelTable:
    """Chooses and binds kernels for one device.

    Args:
        info: the device's facts.
        kernels: every candidate, references included.
        policy: explicit choices and strictness.
        wrap: what a layer gets in place of a resolved kernel, for logs and comparisons; None gives the kernel itself.
    """

    def __init__(
        self,
        info: DeviceInfo,
        kernels: Iterable[Kernel],
        policy: KernelPolicy | None = None,
        wrap: Callable[[Choice, KernelRun], KernelRun] | None = None,
    ) -> None:
        self.info = info
        self._wrap = wrap
        self.policy = policy or KernelPolicy()
        self._candidates: dict[str, list[Kernel]] = {}
        for kernel in kernels:
            self._candidates.setdefault(kernel.op, []).append(kernel)
        self._choices: dict[tuple[str, Facts], Choice] = {}
        self._runs: dict[tuple[str, Facts], KernelRun] = {}
        self._check_explicit()

    def choose(self, op: str, facts: Facts) -> Choice:
        """The choice for one use, without loading it. Raises `KernelError` naming every candidate and its reason."""
        key = (op, facts)
        if key not in self._choices:
            self._choices[key] = self._choose(op, facts)
        return self._choices[key]

    def lacks(self, op: str, facts: Facts) -> Reason | None:
        """Why no kernel but the reference would be chosen, None where one would; notes nothing. Fusions step back for it."""
        try:
            choice = self._choose(op, facts)
        except KernelError as error:
            return str(error)
        if choice.chosen.name != "reference":
            return None
        return "; ".join(f"{kernel.name}: {reason}" for kernel, reason in choice.passed_over) or "no kernel but the reference here"

    def resolve(self, op: str, facts: Facts) -> KernelRun:
        """The kernel for one use, loaded and bound; the same object for equal facts."""
        key = (op, facts)
        if key not in self._runs:
            choice = self.choose(op, facts)
            run = _loaded(choice.chosen, facts)
            self._runs[key] = run if self._wrap is None else self._wrap(choice, run)
        return self._runs[key]

    def explain(self) -> tuple[Choice, ...]:
        """Every choice made so far, in order: the one source of the printed table and of the generated matrix."""
        return tuple(self._choices.values())

    def _check_explicit(self) -> None:
        for op, name in self.policy.explicit.items():
            names = sorted({kernel.name for kernel in self._candidates.get(op, [])})
            if name not in names:
                known = ", ".join(names) or f"none: no such primitive; there are {', '.join(sorted(self._candidates))}"
                raise KernelError(f"kernel {op}={name} is not registered for {self.info.vendor}; registered: {known}")

    def _choose(self, op: str, facts: Facts) -> Choice:
        judged = [(kernel, self._refuse(kernel, facts)) for kernel in self._candidates.get(op, [])]
        fitting = sorted((k for k, reason in judged if reason is None), key=lambda k: -k.score(facts))
        if not fitting:
            reasons = "; ".join(f"{k.name}: {reason}" for k, reason in judged) or "nothing is registered"
            if self.policy.batch_invariant:
                raise KernelError(
                    f"--batch-invariant: {self.info.model} has no kernel for {op} with {facts} whose results do not depend on the batch"
                    f" ({reasons}); run this model without it, or on a device that `pagoda devices --kernels` shows with one"
                )
            raise KernelError(f"no kernel for {op} with {facts} on {self.info.model}: {reasons}")
        chosen = fitting[0]
        if self.policy.strict and chosen.name == "reference":
            reasons = "; ".join(f"{k.name}: {reason}" for k, reason in judged if reason) or "no other is registered"
            raise KernelError(f"--strict-kernels: {op} would fall back to the reference ({reasons})")
        others = [(k, reason) for k, reason in judged if reason is not None]
        others += [(k, f"ranked below {chosen.name}") for k in fitting[1:]]
        return Choice(op, facts, chosen, tuple(others))

    def _refuse(self, kernel: Kernel, facts: Facts) -> Reason | None:
        wanted = self.policy.explicit.get(kernel.op)
        if wanted is not None and kernel.name != wanted:
            return f"{kernel.op}={wanted} was asked for"
        if self.policy.batch_invariant and "batch_invariant" not in kernel.claims:
            return "does not claim batch invariance"
        return kernel.refuse(self.info, facts)


def _loaded(kernel: Kernel, facts: Facts) -> KernelRun:
    """Packages are looked for without an import, so a broken one is found here."""
    try:
        return kernel.load(facts)
    except ImportError as error:
        guilty = ", ".join(kernel.needs.packages) or kernel.implementation
        raise KernelError(
            f"kernel {kernel.name!r} of {kernel.op} does not load, although {guilty} is there: {error}; repair or uninstall it, or take"
            f" another kernel with --kernel {kernel.op}=NAME"
        ) from error
