"""Triton's driver of a device that is not here: kernels are compiled as the real one would have it, and launches are noted, not made.

Kernels run as they are, on meta tensors: what Triton specializes on (dtypes, alignment, constants) is what it would be on the device, so
what is compiled is what the device will ask Triton's cache for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pagoda.hal.errors import DeviceError
from pagoda.hal.info import DeviceInfo
from pagoda.ops.triton import launch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime.driver import driver

MANY = 1 << 16
"""More threads than any kernel asks for: warps are bounded by the compiler already."""


def target_of(info: DeviceInfo) -> GPUTarget:
    """What Triton calls the device. Raises `DeviceError` where Triton, as it comes, has no compiler for it."""
    if info.arch.startswith("sm"):
        return GPUTarget("cuda", int(info.arch.removeprefix("sm")), 32)
    if info.arch.startswith("gfx"):
        return GPUTarget("hip", info.arch, 64 if info.arch.startswith("gfx9") else 32)
    raise DeviceError(f"{info.arch} was asked for; Triton compiles for sm… and gfx… without the device: build on the device itself")


class AbsentDriver(DriverBase):  # type: ignore[misc]
    """Compiles for `target`, knows `shared` bytes of shared memory a program, and launches nothing."""

    def __init__(self, target: GPUTarget, shared: int) -> None:
        super().__init__()
        self._target, self._shared = target, shared
        self.utils = self

    @classmethod
    def is_active(cls) -> bool:
        return False

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> Any:
        # Triton keeps what it compiled by device; no two of these are the same.
        return self

    def get_current_stream(self, device: Any) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")

    def get_benchmarker(self) -> Any:
        raise DeviceError("an absent device was to be measured; measure on the device itself")

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_device_properties(self, device: Any) -> dict[str, int]:
        return {"max_shared_mem": self._shared, "multiprocessor_count": 128}

    def load_binary(self, name: str, kernel: bytes, shared: int, device: Any) -> tuple[Any, ...]:
        return (object(), None, 0, 0, MANY)

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        return lambda *_: None

    def assemble_tensormap_to_arg(self, tensormaps_info: Any, args: Any) -> Any:
        return args


class Compiled(NamedTuple):
    """A kernel that Triton has compiled, or found in its cache.

    Attributes:
        function: its name. key: Triton's, which says all that it depends on.
        shared: bytes of shared memory. warps: of a program.
        files: what lies in the cache of it, by kind of file ("ttgir", "ptx", "cubin", "amdgcn", …).
        found: it was in the cache.
    """

    function: str
    key: str
    shared: int
    warps: int
    files: dict[str, Path]
    found: bool


@contextmanager
def standing_in(info: DeviceInfo, told: Callable[[Compiled], None] = lambda kernel: None) -> Iterator[None]:
    """Within, Triton's kernels are for the device that `info` describes, and take meta tensors; `told` hears of each.

    What needs more shared memory than the device has raises Triton's `OutOfResources`, as it would there. One thread at a time.
    """
    before, listener = driver._active, knobs.compilation.listener
    driver.set_active(AbsentDriver(target_of(info), info.limits.shared_memory_bytes))
    knobs.compilation.listener = lambda **facts: told(_compiled(**facts))
    launch.forget()
    try:
        yield
    finally:
        driver._active, knobs.compilation.listener = before, listener
        launch.forget()


def _compiled(metadata: dict[str, Any], metadata_group: dict[str, str], cache_hit: bool, **_: Any) -> Compiled:
    files = {Path(path).suffix[1:]: Path(path) for path in metadata_group.values()}
    return Compiled(metadata["name"], metadata["hash"], metadata["shared"], metadata["num_warps"], files, cache_hit)
