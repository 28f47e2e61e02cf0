"""Lets a build of torch for CPUs hold fake tensors of devices that it was not built for: torch asks for a guard of each device it indexes.

The guards do nothing. Compiled with g++ against torch's headers, once a session.
"""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import torch

SOURCE = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/GPUTrace.h>
using namespace c10;
template <DeviceType D> struct Guard final : impl::NoOpDeviceGuardImpl<D> {};
template <DeviceType D> void add() {
  static Guard<D> guard;
  auto& place = impl::device_guard_impl_registry[static_cast<size_t>(D)];
  if (place.load() == nullptr) place.store(&guard);
}
extern "C" void add_guards() { add<DeviceType::CUDA>(); add<DeviceType::XPU>(); add<DeviceType::MPS>(); }
"""


def add_guards(folder: Path) -> None:
    """For cuda, xpu and mps, where torch has none."""
    root = Path(torch.__file__).parent
    source, library = folder / "guards.cpp", folder / "libguards.so"
    source.write_text(SOURCE)
    command = ["g++", "-std=c++20", "-O0", "-fPIC", "-shared", "-w", f"-I{root / 'include'}", str(source), "-o", str(library)]
    subprocess.run([*command, f"-L{root / 'lib'}", "-lc10"], check=True)
    ctypes.CDLL(str(library)).add_guards()
