"""The base for torch-style accelerators against torch's real namespaces: a double answers, only to calls that the real one would take.

`torch.cuda`, `torch.xpu` and `torch.mps` are in every build of torch; `torch.npu` is what its wheel declares, written down by
`tests/samples/record_namespace.py`; `torch.hpu`, which comes in no wheel that a registry has, is what its published sources and its
documentation declare.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pagoda.backends.torch_accelerator.api import TorchApi
from pagoda.backends.torch_accelerator.device import AcceleratorDevice
from pagoda.backends.torch_accelerator.graphs import AcceleratorGraphs
from pagoda.backends.torch_accelerator.memory import AcceleratorMemory
from pagoda.backends.torch_accelerator.stream import AcceleratorStream
from pagoda.hal.discovery import find
from pagoda.hal.errors import CapacityError, DeviceError
from pagoda.hal.info import DeviceInfo, Feature
from pagoda.hal.memory import MemoryKind
from torch._subclasses.fake_tensor import FakeTensorMode

GIB = 1 << 30
ANSWERS: dict[str, Any] = {
    "device_count": 2,
    "mem_get_info": (4 * GIB, 8 * GIB),
    "memory_reserved": 3 * GIB,
    "memory_allocated": 2 * GIB,
    "recommended_max_memory": 8 * GIB,
    "driver_allocated_memory": 3 * GIB,
    "current_allocated_memory": 2 * GIB,
}
CLASSES = ("Stream", "Event", "CUDAGraph", "XPUGraph", "NPUGraph", "HPUGraph")


class Double:
    """Stands for an object whose members `real` has; calls must bind to the real signature, and are recorded."""

    def __init__(self, real: Any, calls: list[str], path: str) -> None:
        self._real, self._calls, self._path = real, calls, path

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._real, name)  # AttributeError here as there
        path = f"{self._path}.{name}"
        if name in CLASSES:
            return lambda *args, **kwargs: self._made(real, path, args, kwargs)
        if name in ("graph", "stream"):
            return lambda *args, **kwargs: self._within(real, path, args, kwargs)
        return self._method(real, path, ANSWERS.get(name)) if callable(real) else real

    def _made(self, real: Any, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Double:
        self._check(real, path, args, kwargs)
        return Double(real, self._calls, path)

    @contextmanager
    def _within(self, real: Any, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
        self._check(real, path, args, kwargs)
        yield

    def _method(self, real: Any, path: str, answer: Any) -> Callable[..., Any]:
        bound = isinstance(self._real, type)

        def call(*args: Any, **kwargs: Any) -> Any:
            self._check(real, path, (None, *args) if bound else args, kwargs)
            return Double(torch.cuda.Stream, self._calls, "stream") if path.endswith("current_stream") else answer

        with suppress(ValueError):
            call.__signature__ = inspect.signature(real)  # type: ignore[attr-defined]
        return call

    def _check(self, real: Any, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with suppress(ValueError):  # of a class written in C: its arguments cannot be known
            inspect.signature(real).bind(*args, **kwargs)
        self._calls.append(path)


@pytest.fixture
def calls() -> list[str]:
    return []


def opened(kind: str, calls: list[str], monkeypatch: pytest.MonkeyPatch, *features: Feature) -> AcceleratorDevice:
    api = TorchApi(kind)
    monkeypatch.setattr(api, "module", Double(api.module, calls, kind))
    if api.graph_class is not None:
        name = api.graph_class.__name__
        monkeypatch.setattr(api, "graph_class", getattr(api.module, name))
    info = DeviceInfo("nobody", "double", "none", 1, 8 * GIB, frozenset({"float32"}), frozenset(features))
    return AcceleratorDevice(api, info, None)


@pytest.mark.parametrize("kind", ["cuda", "xpu", "mps"])
def test_memory_streams_and_events_use_what_the_namespace_has(kind: str, calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    device = opened(kind, calls, monkeypatch)
    with FakeTensorMode():
        tensor = device.memory.alloc(MemoryKind.KV, (4, GIB // 16), torch.float32)
        assert tensor.device == torch.device(kind, 1) and device.memory.stats().used["kv"] == GIB
        with pytest.raises(CapacityError, match="are free"):
            device.memory.alloc(MemoryKind.KV, (8 * GIB,), torch.uint8)
    stats = device.memory.stats()
    assert stats.total == 8 * GIB and 0 < stats.free <= 7 * GIB
    stream = device.stream()
    with stream:
        event = stream.record()
    event.wait()
    stream.wait(event)
    device.memory.trim()
    device.synchronize()
    assert {f"{kind}.synchronize", f"{kind}.empty_cache", f"{kind}.Event"} <= set(calls)
    assert (f"{kind}.Stream" in calls) == (kind != "mps")


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_graphs_use_what_the_namespace_has(kind: str, calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    device = opened(kind, calls, monkeypatch, Feature.GRAPHS)
    with FakeTensorMode():
        inputs = torch.ones(4, device=device.torch_device)
        replay = device.graphs.capture("step", lambda x: x + 1, (inputs,))
    assert replay().device == device.torch_device and replay.nbytes == 0
    assert {f"{kind}.graph", f"{kind}.graph_pool_handle", f"{kind}.Stream", f"{kind}.current_stream"} <= set(calls)


SAMPLES = Path(__file__).resolve().parents[1] / "samples"
DECLARED = {kind: json.loads((SAMPLES / f"torch_{kind}_namespace.json").read_text())["members"] for kind in ("npu", "hpu")}


def declared(name: str, entry: Any) -> Any:
    """A function or class of that name with the recorded signatures, and nothing else."""
    if isinstance(entry, dict):
        own = {method: text for method, text in entry.items() if not method.startswith("__") or method in ("__new__", "__init__")}
        return type(name, (), {method: declared(method, text) for method, text in own.items()})
    space: dict[str, Any] = {}
    body = "object.__new__(cls)" if name == "__new__" else "None"
    exec(f"def {name}{entry}: return {body}", space)  # the signature is text in our own file
    return space[name]


def plugged(kind: str, calls: list[str], monkeypatch: pytest.MonkeyPatch) -> TorchApi:
    """The module of a vendor's package, as declared."""
    real = SimpleNamespace(**{name: declared(name, entry) for name, entry in DECLARED[kind].items() if entry is not None})
    get = torch.get_device_module
    monkeypatch.setattr(torch, "get_device_module", lambda asked=None: real if asked == kind else get(asked))
    api = TorchApi(kind)
    monkeypatch.setattr(api, "module", Double(real, calls, kind))
    monkeypatch.setattr(api, "graph_class", getattr(api.module, api.graph_class.__name__))
    return api


@pytest.mark.parametrize("kind", ["npu", "hpu"])
def test_a_namespace_as_its_vendor_declares_it(kind: str, calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    api, here = plugged(kind, calls, monkeypatch), torch.device("cpu")
    assert api.count() == 2 and api.free_and_total(here) == (4 * GIB, 8 * GIB) and api.held_unused(here) == GIB
    memory = AcceleratorMemory(api, here, pinned=False)
    assert 0 < memory.stats().free <= 7 * GIB
    memory.trim()
    stream = AcceleratorStream(api, here)
    with stream:
        event = stream.record()
    event.wait()
    stream.wait(event)
    api.use(here)
    api.synchronize(here)
    assert api.can_capture() and api.pools() == (kind == "npu")
    replay = AcceleratorGraphs(api, here).capture("step", lambda x: x + 1, (torch.ones(4),))
    assert replay().tolist() == [2.0] * 4
    graph = f"{kind.upper()}Graph"
    used = {f"{kind}.{name}" for name in ("set_device", "synchronize", "Stream", "Event", "graph", graph, f"{graph}.replay")}
    assert used <= set(calls), used - set(calls)
    assert (f"{kind}.empty_cache" in calls) == (kind == "npu")


def test_what_is_free_is_not_counted_twice(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    api, here = plugged("hpu", calls, monkeypatch), torch.device("cpu")
    monkeypatch.setitem(ANSWERS, "memory_reserved", 8 * GIB)  # all of the device, as torch.hpu has it
    monkeypatch.setitem(ANSWERS, "mem_get_info", (6 * GIB, 8 * GIB))
    assert api.held_unused(here) == 0 and AcceleratorMemory(api, here, pinned=False).stats().free == 6 * GIB


def test_the_double_refuses_what_the_real_one_lacks(calls: list[str]) -> None:
    with pytest.raises(AttributeError):
        Double(torch.mps, calls, "mps").memory_reserved()
    with pytest.raises(TypeError):
        Double(torch.xpu, calls, "xpu").graph("graph", capture_error_mode="global").__enter__()
    with pytest.raises(TypeError):
        Double(SimpleNamespace(synchronize=declared("synchronize", DECLARED["npu"]["synchronize"])), calls, "npu").synchronize(1, 2)


@pytest.mark.parametrize("kind", ["cuda", "xpu", "mps"])
def test_devices_do_not_mix(kind: str) -> None:
    with FakeTensorMode(), pytest.raises(RuntimeError, match="device"):
        torch.ones(4, device=kind) + torch.ones(4)


def test_a_device_without_its_package_says_so() -> None:
    with pytest.raises(DeviceError, match="import the vendor's package first"):
        TorchApi("hpu")
    with pytest.raises(DeviceError, match=r"is absent|not installed"):
        find("ascend").open()
