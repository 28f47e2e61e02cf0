"""Build steps that pyproject.toml cannot say: the package list of a root-as-package tree, and the native library.

The wheel carries `ops/native`'s shared library when a compiler is there (tag py3-none-PLATFORM: it has no Python or torch
ABI) and is pure Python otherwise.
"""

from __future__ import annotations

import runpy
import shutil
from pathlib import Path

from setuptools import Distribution, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
ROOMS = ("hal", "ops", "backends", "quant", "models", "serving")
NATIVE = Path("ops/native")


def packages() -> list[str]:
    found = find_packages(str(ROOT), include=[pattern for room in ROOMS for pattern in (room, f"{room}.*")])
    return ["pagoda", *(f"pagoda.{name}" for name in found)]


class BuildWithNative(build_py):
    """Compiles `ops/native` into the source tree, then copies it like any package data."""

    def run(self) -> None:
        script = ROOT / NATIVE / "build.py"
        if script.exists():
            print(runpy.run_path(str(script))["build"]())
        super().run()


class PlatformWheel(bdist_wheel):
    """One wheel for all Pythons of a platform, where the native library can be built."""

    def get_tag(self) -> tuple[str, str, str]:
        python, abi, platform = super().get_tag()
        return (python, abi, platform) if self.root_is_pure else ("py3", "none", platform)


class NativeDistribution(Distribution):
    def has_ext_modules(self) -> bool:
        return any(shutil.which(compiler) for compiler in ("g++", "clang++", "c++"))


setup(
    packages=packages(),
    package_dir={"pagoda": "."},
    package_data={
        "pagoda": ["py.typed", "docs/parity/results.json"],
        "pagoda.ops.native": ["*.so", "*.cpp", "*.h"],
        "pagoda.serving.api": ["static/*"],
        "pagoda.serving.api.grpc": ["*.proto", "*.pyi"],
        "pagoda.ops.triton": ["*.json"],
        "pagoda.backends": ["*/*.toml", "*/*.json", "*/*.metal"],
    },
    cmdclass={"build_py": BuildWithNative, "bdist_wheel": PlatformWheel},
    distclass=NativeDistribution,
)
