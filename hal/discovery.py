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


class Listed(NamedTuple):
    """An installed backend by name; `backend` is None when it failed to load, and `probe` then says why."""

    name: str
    backend: Backend | None
    probe: Probe


def backend_names() -> tuple[str, ...]:
    """Names that `--device` takes here, sorted."""
    return tuple(sorted({point.name for point in entry_points(group=BACKENDS)}))


def find(name: str) -> Backend:
    """The backend called `name`.

    Raises `DeviceError` when there is none (naming those there are), when several packages offer it, when its module fails
    to import, or when it was written for another contract.
    """
    points = [point for point in entry_points(group=BACKENDS) if point.name == name]
    if not points:
        raise DeviceError(f"no such device {name!r}; installed backends: {', '.join(backend_names())}, or auto")
    if len({point.value for point in points}) > 1:
        raise DeviceError(f"device {name!r} is offered by {', '.join(point.value for point in points)}; uninstall all but one")
    return _load(points[0])


def find_all() -> tuple[Listed, ...]:
    """Every installed backend with its probe, best first; one that fails to load or to probe is listed as unavailable with the reason."""
    listed = [_look(name) for name in backend_names()]
    return tuple(sorted(listed, key=lambda one: (not one.probe.available, -one.probe.score, one.name)))


def choose(name: str = "auto") -> Found:
    """The backend for `--device NAME`; `auto` takes the highest-scored one whose probe says yes.

    Raises `DeviceError` with the probe's sentence when an explicit choice is not available.
    """
    if name != "auto":
        backend = find(name)
        probe = _probe(backend)
        if not probe.available:
            raise DeviceError(f"device {name!r} is not available: {probe.message}")
        return Found(backend, probe)
    for listed in find_all():
        if listed.backend is not None and listed.probe.available and listed.name not in INSTRUMENTS:
            return Found(listed.backend, listed.probe)
    raise DeviceError(f"no device is available among {', '.join(backend_names())}; see `pagoda devices`")


def plugin_kernels(device: str) -> tuple[Kernel, ...]:
    """Kernels that plugins offer for somebody else's device: each entry point is a callable `(device name) → kernels`.

    Raises `DeviceError` naming the plugin that fails to load.
    """
    return tuple(kernel for point in sorted(entry_points(group=KERNELS)) for kernel in _offered(point, device))


def _offered(point: EntryPoint, device: str) -> tuple[Kernel, ...]:
    try:
        return tuple(point.load()(device))
    except Exception as error:
        raise DeviceError(f"kernel plugin {point.name!r} ({point.value}) failed to load: {error!r}; uninstall or repair it") from error


def _look(name: str) -> Listed:
    try:
        backend = find(name)
    except DeviceError as error:
        return Listed(name, None, Probe(False, str(error)))
    return Listed(name, backend, _probe(backend))


def _probe(backend: Backend) -> Probe:
    try:
        return backend.probe()
    except Exception as error:
        return Probe(False, f"its probe failed: {error!r}; report this to the author of backend {backend.name!r}")


def _load(point: EntryPoint) -> Backend:
    try:
        backend: Backend = point.load()()
    except ModuleNotFoundError as error:
        raise DeviceError(f"backend {point.name!r} is not in this installation: {error}") from error
    except Exception as error:
        raise DeviceError(f"backend {point.name!r} ({point.value}) failed to load: {error!r}; uninstall or repair it") from error
    if backend.contract != CONTRACT_VERSION:
        raise DeviceError(
            f"backend {point.name!r} was written for contract {backend.contract}, this Pagoda has {CONTRACT_VERSION};"
            " install a version that matches"
        )
    return backend
