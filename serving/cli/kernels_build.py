"""Compiles what a model needs: by starting its engine on the device here, or by the same start on one that stands in for an absent one."""

from __future__ import annotations

import shutil
from contextlib import AbstractContextManager
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from pagoda.hal.comm import Topology
from pagoda.hal.device import Describes
from pagoda.hal.discovery import choose, find_all
from pagoda.hal.errors import ConfigError, DeviceError
from pagoda.hal.info import DeviceInfo, Feature
from pagoda.ops import kernel_store
from pagoda.ops.kernel_store import Entry, Key
from pagoda.ops.native import build as native
from pagoda.serving.engine.build import build_runner
from pagoda.serving.engine.config import EngineConfig
from pagoda.serving.engine.runner import Runner
from pagoda.serving.engine.target import open_target


def build_for(config: EngineConfig, root: Path, target: str | None) -> Entry:
    """Compile for `target`, the architecture of an absent device, or for the device that the configuration names. Raises `PagodaError`."""
    if target is not None:
        return host_library(root) if target == kernel_store.HOST else _absent(config, root, target)
    found = choose(config.device.partition(":")[0])
    triton = any(Feature.TRITON in info.features for info in found.backend.devices())
    return _here(config, root) if triton else host_library(root)


def host_library(root: Path) -> Entry:
    """The library for CPUs, compiled unless it was, in its entry."""
    print(native.build())
    if not native.library().exists():
        raise DeviceError("the library for CPUs could not be compiled; install a C++ compiler")
    kept = kernel_store.kept_library(root)
    kept.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(native.library(), kept)
    return kernel_store.write_index(root, kernel_store.host_key(), "every model on a CPU")


def _here(config: EngineConfig, root: Path) -> Entry:
    opened = open_target(config)
    key = _key(opened.info)
    kernel_store.use(opened.info, root)
    _run_all(build_runner(config, Topology(0, 1), opened))
    return kernel_store.write_index(root, key, _built(config))


def _absent(config: EngineConfig, root: Path, target: str) -> Entry:
    backend, info = described(target)
    key = _key(info)
    kernel_store.use(info, root)
    # Weights are not looked at: their shapes are all that matters, and the device has no bytes.
    config = replace(config, device=f"{backend}:{info.model}", load_format="dummy", num_gpu_blocks_override=1024)
    opened = open_target(config, plan_only=True)
    with _standing_in(info):
        _run_all(build_runner(config, Topology(0, config.tensor_parallel_size), opened))
    return kernel_store.write_index(root, key, _built(config))


def _run_all(runner: Runner) -> None:
    """Steps of all sizes, those too that an engine captures when it has time."""
    while (report := runner.capture_next()).job is not None:
        if report.error is not None:
            raise DeviceError(f"{report.job}: {report.error}")
    runner.close()


def described(target: str) -> tuple[str, DeviceInfo]:
    """The backend and the first device model with the architecture `target` (sm_90 and sm90 are one). Raises `DeviceError`."""
    asked, known = target.replace("_", "").lower(), []
    for listed in find_all():
        if isinstance(listed.backend, Describes):
            for info in listed.backend.described():
                if info.arch == asked and Feature.TRITON in info.features:
                    return listed.name, info
                known.append(info.arch)
    raise DeviceError(f"no device of architecture {target!r} is described; there are {', '.join(sorted(set(known)))}, and host")


def _standing_in(info: DeviceInfo) -> AbstractContextManager[None]:
    standing: AbstractContextManager[None] = import_module("pagoda.ops.triton.absent").standing_in(info)
    return standing


def _key(info: DeviceInfo) -> Key:
    key = kernel_store.key_of(info)
    if key is None:
        raise DeviceError(
            f"{info.model} compiles nothing at run time" if find_spec("triton") else "triton is not installed: pip install triton"
        )
    return key


def _built(config: EngineConfig) -> str:
    if not config.model:
        raise ConfigError("no model was given")
    return f"{Path(config.model).name or config.model} in {config.dtype}, {config.tensor_parallel_size} rank(s)"
