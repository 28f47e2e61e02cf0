"""The null backend: any device that the data file describes, without the device. Plans, allocates virtually, replays, computes nothing."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from pagoda.hal.device import Device
from pagoda.hal.errors import DeviceError
from pagoda.hal.info import CONTRACT_VERSION, DeviceInfo, Feature, Limits, Probe
from pagoda.hal.kernel import Kernel

DEFAULT_MODEL = "h200"


class NullBackend:
    """`--device null`: device number i is the i-th of the data file, the default one first."""

    name = "null"
    contract = CONTRACT_VERSION

    def probe(self) -> Probe:
        return Probe(True, f"computes nothing; stands in for {', '.join(_models())}")

    def devices(self) -> tuple[DeviceInfo, ...]:
        return tuple(self.describe(model) for model in _models())

    def open(self, index: int = 0) -> Device:
        models = list(_models())
        if not 0 <= index < len(models):
            raise DeviceError(f"null device {index} was asked for; there are {len(models)}: {', '.join(models)}")
        return self.stand_in(self.describe(models[index]))

    def stand_in(self, info: DeviceInfo) -> Device:
        from pagoda.backends.null.device import NullDevice  # here and not above: it brings torch, a probe must stay light

        return NullDevice(info)

    def describe(self, model: str | None = None) -> DeviceInfo:
        models = list(_models())
        model = model or DEFAULT_MODEL
        if model not in models:
            raise DeviceError(f"no device model {model!r} is described; there are {', '.join(models)}")
        facts = _models()[model]
        return DeviceInfo(
            vendor=facts["vendor"],
            model=model,
            arch=facts["arch"],
            index=models.index(model),
            memory_bytes=facts["memory_bytes"],
            dtypes=frozenset(facts["dtypes"]),
            features=frozenset(Feature(feature) for feature in facts["features"]),
            limits=Limits(facts["shared_memory_bytes"], facts["max_threads"], facts["alignment"], tuple(facts["page_sizes"])),
        )

    def kernels(self) -> Iterable[Kernel]:
        return ()


@cache
def _models() -> dict[str, dict[str, Any]]:
    models: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "devices.json").read_text())
    return models
