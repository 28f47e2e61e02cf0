"""The devices of a vendor that are here, once its package is imported."""

from __future__ import annotations

import torch
from pagoda.backends.torch_accelerator.api import TorchApi
from pagoda.backends.torch_accelerator.device import AcceleratorDevice, checked_index
from pagoda.backends.torch_accelerator.vendor import Vendor
from pagoda.hal.errors import DeviceError
from pagoda.hal.graphs import GraphPolicy
from pagoda.hal.info import DeviceInfo, Feature

SIZES = (1, 2, 4, 8, *range(16, 257, 16), *range(288, 513, 32), 1024, 2048)
"""Sizes that steps are padded to where shapes are static."""


def open_device(vendor: Vendor, index: int) -> AcceleratorDevice:
    """Import the vendor's package and open a device. Raises `DeviceError`."""
    api = _api(vendor)
    info = _info(vendor, api, checked_index(vendor.name, index, api.count()))
    static = GraphPolicy("captured", SIZES, SIZES, static_shapes=True) if Feature.STATIC_SHAPES in info.features else None
    return AcceleratorDevice(api, info, vendor.collectives, static)


def device_infos(vendor: Vendor) -> tuple[DeviceInfo, ...]:
    """Facts of every device; empty on any trouble."""
    try:
        api = _api(vendor)
        return tuple(_info(vendor, api, index) for index in range(api.count()))
    except (DeviceError, RuntimeError, AssertionError):
        return ()


def _api(vendor: Vendor) -> TorchApi:
    vendor.import_package()
    return TorchApi(vendor.kind)


def _info(vendor: Vendor, api: TorchApi, index: int) -> DeviceInfo:
    name = str(api.module.get_device_name(index)) if api.has("get_device_name") else vendor.default_model
    total = api.free_and_total(torch.device(api.kind, index))[1]
    info = vendor.matching(name, index, total, f"torch {torch.__version__}")
    if Feature.GRAPHS in info.features and not api.can_capture():
        return _without_graphs(info)
    return info


def _without_graphs(info: DeviceInfo) -> DeviceInfo:
    """What a torch without graphs for this device leaves of its facts."""
    return DeviceInfo(**{**vars(info), "features": info.features - {Feature.GRAPHS, Feature.STATIC_SHAPES}})
