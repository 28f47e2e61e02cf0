"""Compiles the C++ kernels into one shared library beside the sources: `python -m pagoda.ops.native.build`.

Standard library only and importable by path: an installer runs it where nothing is installed yet.
"""

from __future__ import annotations

import hashlib
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent


def _sources() -> list[Path]:
    return sorted([*HERE.glob("*.cpp"), *HERE.glob("*.h")])


def library() -> Path:
    """Where the library of these very sources is, if it was built: its name holds their digest, so that a stale one is never loaded."""
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in _sources())).hexdigest()
    return HERE / f"libpagoda_native-{digest[:12]}.so"


_X86 = {
    "avx2": ["-mavx2", "-mfma"],
    "avx512": ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mprefer-vector-width=512"],
}
_X86["avx512vnni"] = [*_X86["avx512"], "-mavx512vnni"]
_X86["avx512bf16"] = [*_X86["avx512vnni"], "-mavx512bf16"]

_ARM = {"dotprod": ["-march=armv8.2-a+dotprod"], "i8mm": ["-march=armv8.2-a+dotprod+i8mm+bf16"]}

_ISAS = {"x86_64": _X86, "AMD64": _X86, "aarch64": _ARM, "arm64": _ARM}

_FLAGS = ["-std=c++17", "-O3", "-fPIC", "-fopenmp", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden"]
_FLAGS += ["-Wall", "-Wno-unknown-pragmas", "-Wno-psabi", "-Wno-unused-function"]


class Toolchain(NamedTuple):
    """How to compile.

    Attributes:
        compiler: of C++17, g++ or clang++.
        machine: whose code it makes, as `platform.machine()` says.
        flags: after the usual ones.
    """

    compiler: str
    machine: str = platform.machine()
    flags: tuple[str, ...] = ()


def build(target: Path | None = None) -> str:
    """Compile unless it was, and say in a line what came of it; never raises: without the library the portable kernels run."""
    target = target or library()
    if target.exists():
        return f"native kernels: {target.name} is there already"
    compiler = next((path for name in ("g++", "clang++", "c++") if (path := shutil.which(name))), None)
    if compiler is None:
        return "native kernels: not built, there is no C++ compiler (install g++ or clang++); the portable ones serve"
    try:
        with tempfile.TemporaryDirectory() as folder:
            fresh = compile_library(Toolchain(compiler), Path(folder))
            # Replaced in one go: a process that has the old library loaded keeps it.
            partial = target.with_suffix(".new")
            shutil.copy(fresh, partial)
            partial.replace(target)
    except subprocess.CalledProcessError as error:
        return f"native kernels: not built, {compiler} failed; the portable ones serve\n{error.stderr[-2000:]}"
    for old in set(target.parent.glob("libpagoda_native*.so")) - {target}:
        old.unlink()
    return f"native kernels: built {target.name} with {compiler}"


def compile_library(tools: Toolchain, folder: Path) -> Path:
    """The library in `folder`, with every instruction set of the machine. Raises `CalledProcessError`."""
    units = {name: ["kernels.cpp", f"-DPG_ISA={name}", *flags] for name, flags in levels(tools.machine).items()}
    units |= {name: [f"{name}.cpp"] for name in ("dispatch", "sampling", "pool")}
    if "avx512vnni" in units:
        units["amx"] = ["amx.cpp", "-DPG_ISA=amx", *_X86["avx512vnni"], *_amx_flags(tools.compiler)]
    with ThreadPoolExecutor(2) as pool:
        jobs = [
            pool.submit(_run, [tools.compiler, *_FLAGS, *tools.flags, "-c", *args, "-o", str(folder / f"{name}.o")])
            for name, args in units.items()
        ]
        for job in jobs:
            job.result()
    fresh = folder / "libpagoda_native.so"
    _run([tools.compiler, "-shared", "-fopenmp", *tools.flags, *(str(folder / f"{name}.o") for name in units), "-o", str(fresh)])
    return fresh


def _amx_flags(compiler: str) -> list[str]:
    """None where the compiler does not know tiles: the unit then says that they are not here."""
    flags = ["-mamx-tile", "-mamx-bf16"]
    known = subprocess.run([compiler, *flags, "-E", "-x", "c++", "/dev/null"], capture_output=True, check=False)
    return flags if known.returncode == 0 else []


def levels(machine: str) -> dict[str, list[str]]:
    """Instruction sets of a machine, and the flags that compile for each."""
    return {"baseline": [], **_ISAS.get(machine, {})}


def _run(command: list[str]) -> None:
    subprocess.run(command, cwd=HERE, check=True, capture_output=True, text=True)


if __name__ == "__main__":
    print(build(Path(sys.argv[1]) if len(sys.argv) > 1 else None))
