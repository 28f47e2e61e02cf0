"""Shaders without a Mac: Metal source is compiled by g++, with a header that stands for Metal's library, and runs on the CPU.

`Host.compile_shader` stands in for that of torch.mps and takes the same: tensors, whole numbers (64 bits), other numbers (float), threads
in all and in a group. What it cannot show is what Apple's compiler and GPUs make of the source.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

HEADER = Path(__file__).parents[1] / "native" / "metal"
KERNEL = re.compile(r"^kernel void (\w+)\(", re.MULTILINE)
MOST_ARGUMENTS = 31
"""Entries of Metal's buffer table."""


class Host:
    """A compiler whose libraries lie in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def compile_shader(self, source: str) -> SimpleNamespace:
        names = KERNEL.findall(source)
        ends = "".join(
            f'extern "C" void run_{name}(void** slots, const int64_t* groups, int64_t threads)'
            f" {{ launch(Split<decltype(&{name})>::make(&{name}, slots), groups, threads); }}\n"
            for name in names
        )
        path = self._folder / hashlib.sha256(source.encode()).hexdigest()[:16]
        path.with_suffix(".cpp").write_text(source + ends, encoding="utf-8")
        flags = ["-std=c++20", "-O1", "-fPIC", "-shared", "-Wall", "-Werror", "-Wno-attributes", "-Wno-unused-function"]
        command = ["g++", *flags, f"-I{HEADER}", str(path.with_suffix(".cpp")), "-o", str(path.with_suffix(".so"))]
        subprocess.run(command, check=True, timeout=120)
        library = ctypes.CDLL(str(path.with_suffix(".so")))
        return SimpleNamespace(**{name: _bound(getattr(library, f"run_{name}")) for name in names})


def _bound(function: Any) -> Callable[..., None]:
    function.restype = None

    def run(*arguments: Any, threads: list[int], group_size: list[int]) -> None:
        assert len(arguments) <= MOST_ARGUMENTS and len(threads) == len(group_size) <= 3
        assert all(whole % part == 0 for whole, part in zip(threads, group_size, strict=True))
        held = [_slot(one) for one in arguments]
        slots = (ctypes.c_void_p * len(held))(*(one if isinstance(one, int) else ctypes.addressof(one) for one in held))
        groups = [whole // part for whole, part in zip(threads, group_size, strict=True)] + [1, 1]
        function(slots, (ctypes.c_int64 * 3)(*groups[:3]), ctypes.c_int64(group_size[0]))

    return run


def _slot(argument: Any) -> Any:
    """An address, or a number that has one."""
    if isinstance(argument, torch.Tensor):
        return argument.data_ptr()
    return ctypes.c_float(argument) if isinstance(argument, float) else ctypes.c_int64(argument)
