"""Stages of loops by vendor: what AMD's compiler takes. Triton is a stand-in here; `ci/cross_compile.py` compiles with the real one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

OURS = ("pagoda.ops.triton.launch", "pagoda.ops.triton.assembler")


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Any]:
    """The module, on a device of the vendor that the test names."""
    names = ("triton", "triton.runtime", "triton.runtime.driver")
    triton, runtime, driver = (ModuleType(name) for name in names)
    triton.knobs = SimpleNamespace(nvidia=SimpleNamespace())  # type: ignore[attr-defined]
    target = SimpleNamespace(backend=request.param, arch=90, warp_size=64)
    driver.driver = SimpleNamespace(active=SimpleNamespace(get_current_target=lambda: target))  # type: ignore[attr-defined]
    for name, module in zip(names, (triton, runtime, driver), strict=True):
        monkeypatch.setitem(sys.modules, name, module)
    for name in OURS:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield import_module(OURS[0])
    for name in OURS:
        sys.modules.pop(name, None)


@pytest.mark.parametrize(("launch", "stages"), [("hip", (2, 1)), ("cuda", (8, 8))], indirect=["launch"])
def test_loops_with_a_bias_have_one_stage_on_amd(launch: Any, stages: tuple[int, int]) -> None:
    device = torch.device("meta")
    assert (launch.most_stages(device), launch.most_stages(device, True)) == stages
    assert launch.most_stages(torch.device("cpu"), True) == 8, "the interpreter takes any number"
