"""An opened device: all of it is what torch-style accelerators share."""

from __future__ import annotations

from pagoda.backends.torch_accelerator.api import TorchApi
from pagoda.backends.torch_accelerator.device import AcceleratorDevice
from pagoda.hal.device import Device
from pagoda.hal.graphs import GraphPolicy
from pagoda.hal.info import DeviceInfo, Feature

from fakechip.runtime import load

SIZES = (1, 2, 4, 8, 16, 32, 64)
PROMPTS, ROWS = (16, 32, 64), (4, 16)


def open_device(info: DeviceInfo) -> Device:
    load()
    captured = Feature.GRAPHS in info.features
    static = Feature.STATIC_SHAPES in info.features
    policy = GraphPolicy("captured", SIZES, SIZES, static, prompt_tokens=PROMPTS, prompt_rows=ROWS, burst=2) if captured else GraphPolicy()
    return AcceleratorDevice(TorchApi("fake"), info, None, policy)
