"""The device in torch: loads the compiled part once, and gives it the module `torch.fake` that torch-style code expects."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

LIBRARY = Path(__file__).parent / "libfake.so"


@cache
def load() -> ModuleType:
    """Register the device with torch; `torch.fake` afterwards."""
    library = ctypes.CDLL(str(LIBRARY))
    library.fake_used.restype = library.fake_capacity.restype = library.fake_bytes.restype = ctypes.c_int64
    library.fake_end.restype = ctypes.c_void_p
    library.fake_replay.restype = ctypes.c_char_p
    library.fake_bytes.argtypes = library.fake_replay.argtypes = library.fake_drop.argtypes = [ctypes.c_void_p]
    library.fake_register()
    module = _module(library)
    torch._register_device_module("fake", module)
    return module


def _module(library: Any) -> Any:
    module: Any = ModuleType("torch.fake")
    module.is_available = lambda: True
    module.device_count = torch.accelerator.device_count
    module.current_device = torch.accelerator.current_device_index
    module.set_device = torch.accelerator.set_device_index
    module.synchronize = torch.accelerator.synchronize
    module.current_stream = torch.accelerator.current_stream
    module.Stream = lambda device=None: torch.Stream(device=device or "fake")
    module.stream = lambda stream: stream
    module.Event = lambda enable_timing=False: torch.Event(device="fake", enable_timing=enable_timing)
    module.memory_allocated = lambda device=None: library.fake_used(_index(device))
    module.mem_get_info = lambda device=None: (library.fake_capacity() - library.fake_used(_index(device)), library.fake_capacity())
    module.Graph = type("Graph", (Graph,), {"library": library})
    module.graph = record
    module.graph_pool_handle = lambda: None
    module._is_in_bad_fork = lambda: False
    module.manual_seed_all = lambda seed: None
    return module


def _index(device: Any) -> int:
    index = None if device is None else torch.device(device).index
    return torch.accelerator.current_device_index() if index is None else index


class Graph:
    """Recorded operators, to be run again over the same memory."""

    library: Any

    def __init__(self) -> None:
        self._captured: int | None = None

    def begin(self) -> None:
        if not self.library.fake_begin():
            raise RuntimeError("a capture inside a capture")

    def end(self) -> None:
        self._captured = self.library.fake_end()

    @property
    def nbytes(self) -> int:
        return int(self.library.fake_bytes(self._captured))

    def replay(self) -> None:
        trouble = self.library.fake_replay(self._captured)
        if trouble is not None:
            raise RuntimeError(trouble.decode())

    def __del__(self) -> None:
        if self._captured is not None:
            self.library.fake_drop(self._captured)


@contextmanager
def record(graph: Graph, pool: Any = None) -> Iterator[None]:
    """Everything that this thread submits goes into `graph`."""
    graph.begin()
    try:
        yield
    finally:
        graph.end()
