"""What a request's timer tells: tokens that come together share the time that they took; and what is made of the engine's counters."""

from __future__ import annotations

import re

import pytest
from pagoda.serving.api import metrics
from pagoda.serving.engine.messages import EngineStats
from pagoda.serving.frontend.text_deltas import TextDelta


def test_tokens_that_come_together_share_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter((0.0, 1.0, 3.0, 4.0))
    monkeypatch.setattr(metrics.time, "monotonic", lambda: next(clock))
    told = metrics.Metrics("toy")
    timer = metrics.RequestTimer(told, 3, 1, 8)
    for tokens in ((1,), (2, 3, 4, 5), (6,)):
        timer.step([TextDelta(0, "", tokens)])
    text = told.render(EngineStats()).decode()
    assert re.search(r"^vllm:inter_token_latency_seconds_count{.*} 5\.0", text, re.MULTILINE)
    assert re.search(r"^vllm:inter_token_latency_seconds_sum{.*} 3\.0", text, re.MULTILINE)
    assert re.search(r'^vllm:inter_token_latency_seconds_bucket{.*le="0\.5".*} 4\.0', text, re.MULTILINE)


def test_prompt_tokens_that_were_found_anywhere_are_told_together() -> None:
    text = metrics.Metrics("m").render(EngineStats(prefix_hits=3, external_hits=4)).decode()
    assert 'vllm:prompt_tokens_cached_total{engine="0",model_name="m"} 7.0' in text
