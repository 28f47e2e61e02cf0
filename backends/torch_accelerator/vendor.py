"""A vendor as data: what says that its devices are here, which package torch needs, and how to get or get rid of it. Imports no torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from glob import glob
from importlib import import_module
from pathlib import Path
from typing import Any

from pagoda.backends.torch_accelerator.packages import Installed, autoload_trouble, installed, loaded_by_torch, loads
from pagoda.hal.errors import DeviceError
from pagoda.hal.info import DeviceInfo, Feature, Limits, Probe


@dataclass(frozen=True)
class Vendor:
    """What is particular to a vendor of torch-style accelerators.

    Attributes:
        name: of the backend. title: its devices, in words. kind: torch's device type.
        files: patterns of files that a driver makes, one file a device.
        driver: how devices come to be seen. system: `sys.platform` that it needs; empty means any.
        package: the distribution that gives torch the device; its `module` is imported by `open`. For `package` "torch" the device is
            part of some builds of torch, known by `library`, a pattern among torch's libraries.
        get: how to install it. companions: further (distribution, module) pairs that break the device when they are broken.
        collectives: name of the c10d backend; None carries them over the host.
        triton: name of the vendor's Triton backend; empty where it has none.
        score: preference for `--device auto`.
    """

    name: str
    title: str
    kind: str
    files: str
    driver: str
    package: str
    module: str
    library: str
    get: str
    folder: Path
    default_model: str
    companions: tuple[tuple[str, str], ...] = ()
    collectives: str | None = None
    triton: str = ""
    system: str = ""
    score: int = 90

    def probe(self) -> Probe:
        """Files and package metadata; an installed vendor package is tried in a process of its own, since its import may do anything."""
        trouble = self.broken()
        if trouble:
            return Probe(False, trouble)
        count = len(glob(self.files)) if self.files else 0
        package = installed(self.package, self.library)
        if not count and self.files:
            return Probe(False, f"no {self.title}: {self.files} is absent; {self.driver}. {self._package_words(package)}")
        if not package.usable:
            return Probe(False, f"{count} {self.title}(s), but {package.words}; {self.get}")
        return Probe(True, f"{count} {self.title}(s) through {self.package} {package.version}", score=self.score)

    def broken(self) -> str:
        """Which installed package does not load, why, and how to remove it; empty when all is well."""
        own = [] if self.package == "torch" else [(self.package, self.module)]
        for distribution, module in (*own, *self.companions):
            found = installed(distribution)
            error = loads(module) if found.version else ""
            if error:
                off = ", or set TORCH_DEVICE_BACKEND_AUTOLOAD=0, since import torch fails with it" if loaded_by_torch(module) else ""
                return (
                    f"{distribution} {found.version} is installed, but import {module} fails: {error}; remove it with"
                    f" pip uninstall {distribution}{off}, or repair it: {self.get}"
                )
        return autoload_trouble()

    def describe(self, model: str | None = None) -> DeviceInfo:
        """Facts of a model from the vendor's data file. Raises `DeviceError` naming those there are."""
        models = described(self.folder)
        model = model or self.default_model
        if model not in models:
            raise DeviceError(f"no {self.title} {model!r} is described; there are {', '.join(models)}")
        return _info(models[model], model)

    def matching(self, name: str, index: int, memory_bytes: int, driver: str) -> DeviceInfo:
        """Facts of the opened device called `name`: those of the described model whose words are in it, else of the vendor's default model
        without its architecture, so that no kernel of a particular one is chosen.
        """
        models = described(self.folder)
        known = next((one for one, facts in models.items() if any(word.lower() in name.lower() for word in facts["names"])), None)
        facts = {**models[known or self.default_model], "memory_bytes": memory_bytes}
        if known is None:
            facts |= {"arch": "unknown", "features": sorted({"graphs", "pinned_host"} & set(facts["features"]))}
        return _info(facts, name, index, driver, without=self._lacking())

    def import_package(self) -> None:
        """Import what gives torch the device. Raises `DeviceError`."""
        try:
            import_module(self.module)
        except Exception as error:
            raise DeviceError(f"import {self.module} failed: {error!r}; {self.get}") from error

    def _lacking(self) -> frozenset[Feature]:
        spec = installed("triton")
        there = bool(self.triton) and spec.folder is not None and (spec.folder / "triton/backends" / self.triton).is_dir()
        return frozenset() if there else frozenset({Feature.TRITON})

    def _package_words(self, package: Installed) -> str:
        return f"{self.package} {package.version} is installed" if package.usable else f"Also {package.words}; {self.get}"


@cache
def described(folder: Path) -> dict[str, dict[str, Any]]:
    """The data file of a backend: model → facts."""
    models: dict[str, dict[str, Any]] = json.loads((folder / "devices.json").read_text())
    return models


def _info(facts: dict[str, Any], model: str, index: int = 0, driver: str = "", without: frozenset[Feature] = frozenset()) -> DeviceInfo:
    return DeviceInfo(
        vendor=facts["vendor"],
        model=model,
        arch=facts["arch"],
        index=index,
        memory_bytes=facts["memory_bytes"],
        dtypes=frozenset(facts["dtypes"]),
        features=frozenset(Feature(feature) for feature in facts["features"]) - without,
        limits=Limits(facts["shared_memory_bytes"], facts["max_threads"], facts["alignment"], tuple(facts["page_sizes"])),
        driver=driver,
    )
