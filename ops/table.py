"""The kernel table of a device: the references, the portable kernels, the backend's own kernels, and those that plugins offer for it."""

from __future__ import annotations

from collections.abc import Callable

from pagoda.hal.device import Backend
from pagoda.hal.discovery import plugin_kernels
from pagoda.hal.info import DeviceInfo
from pagoda.hal.kernel import Kernel, KernelRun
from pagoda.hal.table import Choice, KernelPolicy, KernelTable
from pagoda.ops.references import portable_kernels, reference_kernels


def candidates(backend: Backend) -> tuple[Kernel, ...]:
    """Every kernel that could run on a device of `backend`."""
    return (*reference_kernels(), *portable_kernels(), *backend.kernels(), *plugin_kernels(backend.name))


def kernel_table(
    backend: Backend, info: DeviceInfo, policy: KernelPolicy | None = None, wrap: Callable[[Choice, KernelRun], KernelRun] | None = None
) -> KernelTable:
    """An unresolved table for the device that `info` describes; `wrap` as in `KernelTable`, such as `call_log.wrapper`.

    Raises `KernelError` for an explicit choice that is not registered.
    """
    return KernelTable(info, candidates(backend), policy, wrap)
