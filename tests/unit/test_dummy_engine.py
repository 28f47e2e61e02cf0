"""The engine that benchmarks of accelerators drive in this process: it answers here as it is to there."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


def test_a_dummy_engine_answers_and_tells_how_far_its_tokens_lead() -> None:
    from gpu_workloads import DummyEngine
    from report_shapes import SHAPES

    with DummyEngine(SHAPES["tiny"], device="cpu", dtype="float32", max_model_len=64, kv_cache_memory_bytes=1 << 20) as engine:
        assert engine.generate([[10, 11, 12], [20] * 7], 5) == [5, 5]
        tokens, leads = engine.leads([10, 11, 12], 4)
        assert tokens == engine.tokens([[10, 11, 12]], 4, temperature=0)[0] and all(lead >= 0 for lead in leads) and len(leads) == 4
    assert "gpu_workloads" in sys.modules
