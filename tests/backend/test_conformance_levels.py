"""The built-in devices conform."""

from __future__ import annotations

import pytest
from pagoda.ops.native.library import available
from pagoda.serving.conformance.runner import run_levels


@pytest.fixture(autouse=True)
def native_kernels() -> None:
    """What the CPU claims can only be shown with them."""
    assert available() is None, "run python -m pagoda.ops.native.build"


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_device_and_graphs(device: str) -> None:
    report = run_levels(device, (0, 2))
    assert report.passed(), report.to_markdown()


@pytest.mark.heavy
@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_kernels(device: str) -> None:
    report = run_levels(device, (1,))
    assert report.passed(), report.to_markdown()


@pytest.mark.heavy
def test_collectives() -> None:
    report = run_levels("cpu", (3,))
    assert report.passed(), report.to_markdown()


@pytest.mark.heavy
@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_models(device: str) -> None:
    report = run_levels(device, (4,))
    assert report.passed(), report.to_markdown()


@pytest.mark.heavy
@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_engine(device: str) -> None:
    report = run_levels(device, (5,))
    assert report.passed(), report.to_markdown()
