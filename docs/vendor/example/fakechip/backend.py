"""Who we are, what is here, and how it is opened, in three modes. Imports nothing heavy: a probe must be light and safe before fork."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from pagoda.hal.device import Device
from pagoda.hal.errors import DeviceError
from pagoda.hal.info import CONTRACT_VERSION, DeviceInfo, Feature, Limits, Probe
from pagoda.hal.kernel import Kernel

COUNT = 2
CAPACITY = 1 << 30


class FakeBackend:
    """`--device fake`: steps run eagerly."""

    name = "fake"
    contract = CONTRACT_VERSION
    features = frozenset({Feature.PINNED_HOST, Feature.FLOAT64, Feature.INT8})

    def probe(self) -> Probe:
        if not (Path(__file__).parent / "libfake.so").exists():
            return Probe(False, "fakechip is installed without its compiled part: install it again with g++ at hand")
        return Probe(True, f"{COUNT} software accelerators with memory that the host cannot touch; for tests", score=-100)

    def devices(self) -> tuple[DeviceInfo, ...]:
        return tuple(self._info(index) for index in range(COUNT))

    def open(self, index: int = 0) -> Device:
        from fakechip.device import open_device  # registers the device with torch: here and nowhere else

        if not 0 <= index < COUNT:
            raise DeviceError(f"fake device {index} was asked for; there are {COUNT}")
        return open_device(self._info(index))

    def describe(self, model: str | None = None) -> DeviceInfo:
        if model not in (None, "fake-1"):
            raise DeviceError(f"no fake device {model!r} is known; there is fake-1")
        return self._info(0)

    def kernels(self) -> Iterable[Kernel]:
        return ()

    def _info(self, index: int) -> DeviceInfo:
        return DeviceInfo(
            vendor="fake",
            model="fake-1",
            arch="pu1",
            index=index,
            memory_bytes=CAPACITY,
            dtypes=frozenset({"float64", "float32", "float16", "bfloat16"}),
            features=self.features,
            limits=Limits(alignment=64, page_sizes=(16, 32)),
            default_dtype="float32",
        )


class FakeGraphBackend(FakeBackend):
    """`--device fake-graph`: decode steps are recorded and replayed."""

    name = "fake-graph"
    features = FakeBackend.features | {Feature.GRAPHS}


class FakeStaticBackend(FakeBackend):
    """`--device fake-static`: every step is padded to one of a few sizes, prompts too, and replayed."""

    name = "fake-static"
    features = FakeGraphBackend.features | {Feature.STATIC_SHAPES}
