"""One opened NVIDIA GPU: facts from the driver; all else is what torch-style accelerators share."""

from __future__ import annotations

from pathlib import Path

import torch
from pagoda.backends.cuda.comm import CudaCommunicator
from pagoda.backends.torch_accelerator.api import TorchApi
from pagoda.backends.torch_accelerator.device import AcceleratorDevice, checked_index
from pagoda.backends.torch_accelerator.graphs import BURST, ROWS
from pagoda.hal.graphs import GraphPolicy
from pagoda.hal.info import DeviceInfo, Feature, Limits

PAGE_SIZES = (64, 32, 16, 128)
"""Preferred first: pages of 64 tokens are whole tiles of the attention kernels, and cost a quarter of the hashes of 16."""

PROMPTS = (32, 64, 128, 256, 384, 512, 768, *range(1024, 2049, 256), *range(2560, 4097, 512), *range(5120, 8193, 1024))
"""Tokens of captured steps with prompts: most steps pad a quarter at most. One that is not captured costs the host 15 to 30 ms."""
PROMPT_ROWS = (16, 64, 256)

POLICY = GraphPolicy("captured", ROWS, ROWS, prompt_tokens=PROMPTS, prompt_rows=PROMPT_ROWS, shared=True, burst=BURST)


class CudaDevice(AcceleratorDevice):
    """GPU number `index`."""

    group_kind = CudaCommunicator

    def __init__(self, index: int) -> None:
        api = TorchApi("cuda")
        super().__init__(api, _info(checked_index("cuda", index, api.count())), "nccl", POLICY)


def device_infos() -> tuple[DeviceInfo, ...]:
    """Facts of every GPU; empty on any trouble."""
    try:
        return tuple(_info(index) for index in range(torch.cuda.device_count()))
    except RuntimeError:
        return ()


def _info(index: int) -> DeviceInfo:
    properties = torch.cuda.get_device_properties(index)
    features = {Feature.GRAPHS, Feature.PINNED_HOST, Feature.TRITON, Feature.INT8, Feature.FLOAT64}
    dtypes = {"float64", "float32", "float16"}
    if properties.major >= 8:
        dtypes.add("bfloat16")
    if (properties.major, properties.minor) >= (8, 9):
        features.add(Feature.FP8)
        dtypes |= {"float8_e4m3fn", "float8_e5m2"}
    if properties.major >= 10:
        features.add(Feature.FP4)
    if torch.cuda.device_count() > 1:
        features.add(Feature.P2P)
    return DeviceInfo(
        vendor="nvidia",
        model=properties.name,
        arch=f"sm{properties.major}{properties.minor}",
        index=index,
        memory_bytes=properties.total_memory,
        dtypes=frozenset(dtypes),
        features=frozenset(features),
        limits=Limits(properties.shared_memory_per_block_optin, properties.max_threads_per_block, 256, PAGE_SIZES),
        driver=_driver(),
    )


def _driver() -> str:
    """Versions of the driver's kernel module and of the CUDA that torch was built with."""
    module = Path("/proc/driver/nvidia/version")
    words = module.read_text().split() if module.exists() else []
    version = next((word for word in words if word[:1].isdigit() and "." in word), "unknown")
    return f"{version}, CUDA {torch.version.cuda}"
