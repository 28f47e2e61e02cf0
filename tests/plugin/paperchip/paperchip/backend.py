"""Who we are, what is here, and what we offer. Imports nothing heavy: a probe must be light and safe before fork."""

from __future__ import annotations

from collections.abc import Iterable

from pagoda.hal.device import Device
from pagoda.hal.errors import DeviceError
from pagoda.hal.info import CONTRACT_VERSION, DeviceInfo, Feature, Limits, Probe
from pagoda.hal.kernel import Kernel

from paperchip.kernels import own_kernels

COUNT = 1
"""Devices of this chip in a machine; they do not talk to each other, so more would promise collectives."""


class PaperBackend:
    """`--device paperchip`."""

    name = "paperchip"
    contract = CONTRACT_VERSION

    def probe(self) -> Probe:
        return Probe(True, "a paper chip; it computes on the host", score=1)

    def devices(self) -> tuple[DeviceInfo, ...]:
        return tuple(_info(index) for index in range(COUNT))

    def open(self, index: int = 0) -> Device:
        from paperchip.device import PaperDevice  # the vendor's runtime starts here and nowhere else

        if not 0 <= index < COUNT:
            raise DeviceError(f"paperchip {index} was asked for; there is one, number 0")
        return PaperDevice(_info(index))

    def describe(self, model: str | None = None) -> DeviceInfo:
        if model not in (None, "paper-1"):
            raise DeviceError(f"no paperchip {model!r} is known; there is paper-1")
        return _info(0)

    def kernels(self) -> Iterable[Kernel]:
        return own_kernels()


def _info(index: int) -> DeviceInfo:
    return DeviceInfo(
        vendor="paper",
        model="paper-1",
        arch="a4",
        index=index,
        memory_bytes=1 << 30,
        dtypes=frozenset({"float32", "bfloat16"}),
        features=frozenset({Feature.GRAPHS, Feature.STATIC_SHAPES}),
        limits=Limits(shared_memory_bytes=0, max_threads=1, alignment=64, page_sizes=(32,)),
    )
