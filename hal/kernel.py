"""A kernel is three moments: `pack` once after load, `plan` once a step on the host, `run` inside the graph.

A `Kernel` is an import-free record: a backend can list it, `plan` can print it and the matrix can show it without the
vendor's package. Its implementation is loaded at resolution and bound to the facts of one use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol

from pagoda.hal.info import DeviceInfo, Feature

if TYPE_CHECKING:
    import torch

Reason = str
"""Why a kernel does not fit: one clause, no full stop."""


class Facts(Protocol):
    """Static facts of one use of a primitive: a frozen, hashable dataclass declared beside the op. All have a `dtype`."""

    @property
    def dtype(self) -> str: ...


@dataclass(frozen=True)
class Needs:
    """What a kernel asks of a device and of a use, as data; empty means anything.

    Attributes:
        archs: device architectures (`DeviceInfo.arch`).
        features: all of these device features.
        dtypes: names of the dtypes it computes in.
        facts: allowed values of further facts, such as `{"head_dim": (64, 128)}`.
        facts_on: the same for an architecture alone, which has less room or a compiler that does worse.
        packages: Python packages that must be installed.
    """

    archs: frozenset[str] = frozenset()
    features: frozenset[Feature] = frozenset()
    dtypes: frozenset[str] = frozenset()
    facts: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    facts_on: Mapping[str, Mapping[str, tuple[Any, ...]]] = field(default_factory=dict)
    packages: tuple[str, ...] = ()

    def refuse_device(self, info: DeviceInfo) -> Reason | None:
        """Why no use of it fits this device and installation, or None."""
        if self.archs and info.arch not in self.archs:
            return f"needs {' or '.join(sorted(self.archs))}, the device is {info.arch}"
        missing = sorted(feature.value for feature in self.features - info.features)
        if missing:
            return f"the device lacks {', '.join(missing)}"
        absent = [package for package in self.packages if find_spec(package) is None]
        return f"package {', '.join(absent)} is not installed" if absent else None

    def refuse(self, info: DeviceInfo, facts: Facts) -> Reason | None:
        """The first unmet need, or None."""
        return self.refuse_device(info) or self.refuse_use(info, facts)

    def refuse_use(self, info: DeviceInfo, facts: Facts) -> Reason | None:
        """The first need that a use does not meet, on a device that has all that is asked of it."""
        if self.dtypes and facts.dtype not in self.dtypes:
            return f"computes {', '.join(sorted(self.dtypes))}, not {facts.dtype}"
        for allowed_here, where in ((self.facts, ""), (self.facts_on.get(info.arch, {}), f" on {info.arch}")):
            for name, allowed in allowed_here.items():
                value = getattr(facts, name)
                if value not in allowed:
                    return f"{name} must be one of {', '.join(map(str, allowed))}{where}, not {value}"
        return None


class KernelRun(Protocol):
    """A kernel bound to the facts of one use; what a layer holds."""

    def pack(self, weights: Mapping[str, torch.Tensor], out: Any | None = None) -> Any:
        """Weights in the layout this kernel wants, once after load.

        With `out` (an earlier result), writes into the same addresses: weight updates, wake, expert moves.
        """
        ...

    def plan(self, batch: Any, buffers: Any | None = None) -> Any:
        """Host-side metadata of one step, written into stable `buffers` where given (an earlier result)."""
        ...

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The primitive itself, with the signature that the op declares; capturable, allocates only its outputs."""
        ...


@dataclass(frozen=True)
class Kernel:
    """A kernel on offer.

    Attributes:
        op: the primitive's name.
        name: who provides it ("reference", "onednn", "native", …).
        implementation: "module:attribute" of a callable `(facts) → KernelRun`, imported at resolution.
        needs: static needs.
        accepts: the rest of the question, asked once at resolution.
        rank: measured preference for these facts (a lookup in a table that a benchmark in the tree makes); highest wins.
        claims: what conformance may hold it to: "batch_invariant", "capturable".
        packed_bytes: bytes that `pack` keeps of one use, when it keeps tensors of its own and none of its inputs.
        layout: names how `pack` lays weights out, where uses of one table may share them: the other's run then takes `share(packed)`.
        needs_host_lengths: `plan` reads exact lengths on the host, which bars multi-step replays.
        eps: relative spacing of the numbers it computes with, where that is coarser than the dtype's (inputs made integers).
    """

    op: str
    name: str
    implementation: str
    needs: Needs = field(default_factory=Needs)
    accepts: Callable[[Any], Reason | None] | None = None
    rank: Callable[[Any], float] | float = 0.0
    claims: frozenset[str] = frozenset()
    packed_bytes: Callable[[Any], int] | None = None
    layout: str | None = None
    needs_host_lengths: bool = False
    eps: float = 0.0

    def refuse(self, info: DeviceInfo, facts: Facts) -> Reason | None:
        """Why it does not fit this device and use, or None."""
        reason = self.needs.refuse(info, facts)
        if reason is None and self.accepts is not None:
            reason = self.accepts(facts)
        return reason

    def score(self, facts: Facts) -> float:
        return self.rank(facts) if callable(self.rank) else self.rank

    def load(self, facts: Facts) -> KernelRun:
        """Import the implementation and bind it to `facts`."""
        module, _, attribute = self.implementation.partition(":")
        run: KernelRun = getattr(import_module(module), attribute)(facts)
        return run


class PlainKernel:
    """Base for kernels that need neither packing nor planning: weights pass through, a step has no metadata."""

    def __init__(self, facts: Any) -> None:
        self.facts = facts

    def pack(self, weights: Mapping[str, torch.Tensor], out: Any | None = None) -> Any:
        if out is None:
            return dict(weights)
        for name, tensor in weights.items():
            out[name].copy_(tensor)
        return out

    def plan(self, batch: Any, buffers: Any | None = None) -> Any:
        return None
