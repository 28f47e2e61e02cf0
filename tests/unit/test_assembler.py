"""Which assembler makes Triton's programs: the newest that Triton brings, or the one that the user names. Triton is a stand-in here."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


@pytest.fixture
def knobs(monkeypatch: pytest.MonkeyPatch) -> Any:
    tools = {version: SimpleNamespace(path=f"ptxas-{version}", version=version) for version in ("12.8", "12.10", "13.0")}
    found = SimpleNamespace(nvidia=SimpleNamespace(ptxas=tools["12.8"], ptxas_blackwell=tools["12.10"]), propagate_env=True, tools=tools)
    triton = ModuleType("triton")
    triton.knobs = found  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "triton", triton)
    monkeypatch.delitem(sys.modules, "pagoda.ops.triton.assembler", raising=False)
    monkeypatch.delenv("TRITON_PTXAS_PATH", raising=False)
    yield found
    sys.modules.pop("pagoda.ops.triton.assembler", None)


def use_newest() -> None:
    import_module("pagoda.ops.triton.assembler").use_newest()


def test_the_newer_of_two_is_taken_and_the_environment_left_alone(knobs: Any) -> None:
    use_newest()
    assert knobs.nvidia.ptxas == "ptxas-12.10" and knobs.propagate_env


def test_the_first_stays_where_it_is_newer_or_alone(knobs: Any) -> None:
    knobs.nvidia.ptxas = knobs.tools["13.0"]
    use_newest()
    assert knobs.nvidia.ptxas is knobs.tools["13.0"]
    del knobs.nvidia.ptxas_blackwell
    use_newest()
    assert knobs.nvidia.ptxas is knobs.tools["13.0"]


def test_the_one_that_the_user_names_stays(knobs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_PTXAS_PATH", "/somewhere/ptxas")
    use_newest()
    assert knobs.nvidia.ptxas is knobs.tools["12.8"]
