"""The engine on devices that capture steps, with and without static shapes, made of the CPU: replays must change nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from pagoda.ops.native.library import available
from pagoda.serving.conformance.runner import run_levels


@pytest.fixture(autouse=True)
def native_kernels() -> None:
    """What the CPU claims can only be shown with them."""
    assert available() is None, "run python -m pagoda.ops.native.build"


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


@pytest.mark.heavy
@pytest.mark.parametrize("static", [False, True])
def test_engine(static: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"captured{'_static' if static else ''}"
    (tmp_path / f"{name}.py").write_text(BACKEND.format(name=name, static=static))
    info = tmp_path / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[pagoda.backends]\n{name} = {name}:Captured\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    report = run_levels(name, (2, 5))
    assert report.passed(), report.to_markdown()
