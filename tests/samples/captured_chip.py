"""A device that captures steps, with or without static shapes, made of the CPU and found as a stranger's plugin is."""

from __future__ import annotations

from pathlib import Path

BACKEND = """
from dataclasses import replace
from pagoda.backends.cpu.backend import CpuBackend
from pagoda.backends.torch_host.graphs import EagerGraphs
from pagoda.hal.graphs import GraphPolicy
from pagoda.hal.info import Feature
SIZES = (1, 2, 4, 8, 16, 64)
PROMPTS = (8, 16, 32, 64, 128, 256)
class Captured(CpuBackend):
    name = "{name}"
    def describe(self, model=None):
        info = super().describe()
        return replace(info, features=info.features | {{Feature.GRAPHS}} | ({{Feature.STATIC_SHAPES}} if {static} else set()))
    def open(self, index=0):
        device = super().open(index)
        device.info = self.describe()
        policy = GraphPolicy("captured", SIZES, SIZES, static_shapes={static}, prompt_tokens=PROMPTS, prompt_rows=(2, 16), burst=3)
        device.graphs = EagerGraphs(policy)
        return device
"""


def install(folder: Path, static: bool = False) -> str:
    """Put the plugin into a folder that the caller has, or will have, on `sys.path`. Returns the device's name."""
    name = f"captured{'_static' if static else ''}"
    (folder / f"{name}.py").write_text(BACKEND.format(name=name, static=static))
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[pagoda.backends]\n{name} = {name}:Captured\n")
    return name
