"""`--device cuda`: NVIDIA GPUs through torch. Probing reads files only; the driver starts in `open`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pagoda.backends.cuda.kernels import cuda_kernels
from pagoda.backends.torch_accelerator.packages import autoload_trouble
from pagoda.hal.device import Device
from pagoda.hal.errors import DeviceError
from pagoda.hal.info import CONTRACT_VERSION, DeviceInfo, Feature, Limits, Probe
from pagoda.hal.kernel import Kernel

DEFAULT_MODEL = "h200"


class CudaBackend:
    """Every NVIDIA GPU that the driver shows."""

    name = "cuda"
    contract = CONTRACT_VERSION

    def probe(self) -> Probe:
        broken = autoload_trouble()
        if broken:
            return Probe(False, broken)
        count = len(_device_files())
        if not count:
            return Probe(False, "no NVIDIA GPU: /dev/nvidia0 is absent; install the driver, or give the container its GPUs")
        if not _torch_has_cuda():
            return Probe(False, f"{count} NVIDIA GPU(s), but this torch is a CPU build; install torch's CUDA build")
        return Probe(True, f"{count} NVIDIA GPU(s) through torch", score=100)

    def devices(self) -> tuple[DeviceInfo, ...]:
        if not self.probe().available:
            return ()
        from pagoda.backends.cuda.device import device_infos  # starts the driver; a probe must not

        return device_infos()

    def open(self, index: int = 0) -> Device:
        probe = self.probe()
        if not probe.available:
            raise DeviceError(probe.message)
        from pagoda.backends.cuda.device import CudaDevice  # the only place that imports vendor code

        return CudaDevice(index)

    def describe(self, model: str | None = None) -> DeviceInfo:
        models = _models()
        model = model or DEFAULT_MODEL
        if model not in models:
            raise DeviceError(f"no GPU model {model!r} is described; there are {', '.join(models)}")
        facts = models[model]
        return DeviceInfo(
            vendor="nvidia",
            model=model,
            arch=facts["arch"],
            index=0,
            memory_bytes=facts["memory_bytes"],
            dtypes=frozenset(facts["dtypes"]),
            features=frozenset(Feature(feature) for feature in facts["features"]),
            limits=Limits(facts["shared_memory_bytes"], 1024, 256, tuple(facts["page_sizes"])),
        )

    def described(self) -> tuple[DeviceInfo, ...]:
        return tuple(self.describe(model) for model in _models())

    def kernels(self) -> Iterable[Kernel]:
        return cuda_kernels()


def _device_files() -> list[Path]:
    return [path for path in Path("/dev").glob("nvidia[0-9]*") if path.name[6:].isdigit()]


def _torch_has_cuda() -> bool:
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    return any((Path(spec.origin).parent / "lib").glob("*torch_cuda*"))


def _models() -> dict[str, dict[str, Any]]:
    models: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "devices.json").read_text())
    return models
