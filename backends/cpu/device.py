"""The opened CPU: a host device whose decode steps are recorded where the native kernels are there."""

from __future__ import annotations

import logging

from pagoda.backends.cpu.graphs import RecordedGraphs
from pagoda.backends.torch_host import machine
from pagoda.backends.torch_host.device import HostDevice
from pagoda.backends.torch_host.graphs import EagerGraphs
from pagoda.hal.comm import Communicator, Topology
from pagoda.hal.info import DeviceInfo
from pagoda.ops.native.library import available

log = logging.getLogger("pagoda.cpu")


class CpuDevice(HostDevice):
    """`HostDevice` with recorded steps."""

    def communicator(self, topology: Topology) -> Communicator:
        # Collectives are no calls that a recorder could see: ranks of a group run their steps as they are.
        self.graphs = EagerGraphs()
        machine.settle(topology.rank, topology.world)  # before weights and pages, whose place is where they are first written
        return super().communicator(topology)


def open_device(info: DeviceInfo) -> CpuDevice:
    """The CPU that `info` describes; says so where it runs without its kernels."""
    reason = available()
    if reason is not None:
        log.warning("%s: the portable kernels serve, many times slower", reason)
    return CpuDevice(info, machine.available_bytes, RecordedGraphs() if reason is None else None)
