"""The three built-in devices behind one contract, two of them in one process."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from pagoda.hal.device import Backend, Device
from pagoda.hal.discovery import find
from pagoda.hal.errors import DeviceError
from pagoda.hal.info import Feature
from pagoda.hal.kv import CacheGroup, CacheKind, LayerCache
from pagoda.hal.memory import MemoryKind, MemoryRequest


@pytest.mark.parametrize("name", ["cpu", "reference", "null"])
def test_contract(name: str) -> None:
    backend = find(name)
    device = backend.open()
    assert isinstance(backend, Backend) and isinstance(device, Device)
    assert device.info == backend.describe() == backend.devices()[0]
    first, second = device.stream(), device.stream()
    with first:
        event = first.record()
    second.wait(event)
    device.synchronize()
    assert event.done() and event.elapsed_ms(second.record()) >= 0
    assert device.extension(Backend) is None
    with pytest.raises(DeviceError):
        backend.open(99)
    with pytest.raises(DeviceError):
        backend.describe("abacus")


def test_two_devices_in_one_process_count_apart() -> None:
    cpu, reference = find("cpu").open(), find("reference").open()
    tensor = cpu.memory.alloc(MemoryKind.WORK, (1000,), torch.float32)
    assert cpu.memory.stats().used["work"] == tensor.nbytes
    assert reference.memory.stats().used["work"] == 0


def test_a_probe_does_not_bring_torch() -> None:
    script = "import sys; from pagoda.hal.discovery import find_all; find_all(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_the_null_device_stands_in_for_absent_ones() -> None:
    backend = find("null")
    info = backend.describe("mi300x")
    assert (info.vendor, info.arch) == ("amd", "gfx942") and Feature.GRAPHS in info.features
    device = backend.open(info.index)
    assert device.info == info
    plan = device.memory.plan(MemoryRequest(weights=140 << 30, work=1 << 30, page_bytes=1 << 20))
    pool = device.memory.alloc(MemoryKind.KV, (plan.num_pages, plan.page_bytes), torch.uint8)
    assert pool.device.type == "meta" and device.memory.stats().used["kv"] == plan.kv > 1 << 34


def test_a_null_replay_computes_nothing_but_can_be_read() -> None:
    device = find("null").open()
    calls = []

    def step(x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        calls.append(1)
        return x.argmax(-1), {"logits": x @ x.T}

    replay = device.graphs.capture("k", step, (device.memory.alloc(MemoryKind.WORK, (4, 1 << 20), torch.float32),))
    for _ in range(3):
        tokens, rest = replay()
    assert calls == [1]
    assert tokens.tolist() == [0, 0, 0, 0] and rest["logits"].shape == (4, 4)


def test_null_pages_have_shapes() -> None:
    cache = LayerCache(CacheKind.FULL, 8, 128, 128, "bfloat16")
    pool, views = find("null").open().kv_layout(CacheGroup(CacheKind.FULL, (0, 1), (cache, cache), 16, 0)).allocate(1000)
    assert pool.shape == (1000, 2 * 16 * 2 * 8 * 128 * 2) and views[1].v.shape == (1000, 16, 8, 128)
