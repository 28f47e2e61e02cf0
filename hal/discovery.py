"""Backends and kernels by name, through entry points: a built-in is found the same way as a stranger's plugin."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import NamedTuple

from pagoda.hal.device import Backend
from pagoda.hal.errors import DeviceError
from pagoda.hal.info import CONTRACT_VERSION, Probe
from pagoda.hal.kernel import Kernel

BACKENDS = "pagoda.backends"
KERNELS = "pagoda.kernels"

INSTRUMENTS = frozenset({"null", "reference", "fake"})
"""Backends that exist for measuring and testing; `auto` never picks them."""


class Found(NamedTuple):
    """A backend and what its probe said."""

    backend: Backend
    probe: Probe


def backend_names() -> tuple[str, ...]:
    """Names that `--device` takes here, sorted."""
    return tuple(sorted({point.name for point in entry_points(group=BACKENDS)}))


def find(name: str) -> Backend:
    """The backend called `name`.

    Raises `DeviceError` when there is none (naming those there are), when its module fails to import, or when it was
    written for another contract.
    """
    points = [point for point in entry_points(group=BACKENDS) if point.name == name]
    if not points:
        raise DeviceError(f"no such device {name!r}; installed backends: {', '.join(backend_names())}, or auto")
    return _load(points[0])


def find_all() -> tuple[Found, ...]:
    """Every backend with its probe, best first."""
    found = [Found(backend, backend.probe()) for backend in map(find, backend_names())]
    return tuple(sorted(found, key=lambda f: (-f.probe.available, -f.probe.score, f.backend.name)))


def choose(name: str = "auto") -> Found:
    """The backend for `--device NAME`; `auto` takes the highest-scored one whose probe says yes.

    Raises `DeviceError` with the probe's sentence when an explicit choice is not available.
    """
    if name != "auto":
        backend = find(name)
        probe = backend.probe()
        if not probe.available:
            raise DeviceError(f"device {name!r} is not available: {probe.message}")
        return Found(backend, probe)
    usable = [f for f in find_all() if f.probe.available and f.backend.name not in INSTRUMENTS]
    if not usable:
        raise DeviceError(f"no device is available among {', '.join(backend_names())}; see `pagoda devices`")
    return usable[0]


def plugin_kernels(device: str) -> tuple[Kernel, ...]:
    """Kernels that plugins offer for somebody else's device: each entry point is a callable `(device name) → kernels`."""
    return tuple(kernel for point in entry_points(group=KERNELS) for kernel in point.load()(device))


def _load(point: EntryPoint) -> Backend:
    try:
        backend: Backend = point.load()()
    except Exception as error:
        raise DeviceError(f"backend {point.name!r} ({point.value}) failed to load: {error!r}; uninstall or repair it") from error
    if backend.contract != CONTRACT_VERSION:
        raise DeviceError(
            f"backend {point.name!r} was written for contract {backend.contract}, this Pagoda has {CONTRACT_VERSION};"
            " install a version that matches"
        )
    return backend
