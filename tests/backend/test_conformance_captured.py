"""The engine on devices that capture steps, with and without static shapes, made of the CPU: replays must change nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from captured_chip import install
from pagoda.ops.native.library import available
from pagoda.serving.conformance.runner import run_levels


@pytest.fixture(autouse=True)
def native_kernels() -> None:
    """What the CPU claims can only be shown with them."""
    assert available() is None, "run python -m pagoda.ops.native.build"


@pytest.mark.heavy
@pytest.mark.parametrize("static", [False, True])
def test_engine(static: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = install(tmp_path, static)
    monkeypatch.syspath_prepend(str(tmp_path))
    report = run_levels(name, (2, 5))
    assert report.passed(), report.to_markdown()
