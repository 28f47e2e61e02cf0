"""What a request's timer tells: tokens that come together share the time that they took; and what is made of the engine's counters."""

from __future__ import annotations

import re

import pytest
from pagoda.serving.api import metrics
from pagoda.serving.engine.messages import EngineStats
from pagoda.serving.frontend.text_deltas import TextDelta
from scripted import Scripted, text_side
from toy_server import toy_server

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


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


def test_a_request_of_several_sequences_tells_its_longest() -> None:
    told = metrics.Metrics("m")
    timer = metrics.RequestTimer(told, 3, 2, 8)
    for index, tokens in ((0, (1,)), (1, (2, 3)), (1, (4,)), (0, (5,))):
        timer.step([TextDelta(index, "", tokens)])
    timer.end()
    text = told.render(EngineStats()).decode()
    assert 'vllm:request_max_num_generation_tokens_sum{engine="0",model_name="m"} 3.0' in text
    assert 'vllm:request_generation_tokens_sum{engine="0",model_name="m"} 5.0' in text


def test_numbers_of_the_engine_have_their_labels() -> None:
    counts = {"iteration_tokens": ((0, 2, 0, 1, *[0] * 10), 40.0)}
    stats = EngineStats(
        waiting=5, deferred=2, computed_tokens=7, prefix_hits=3, external_hits=4, corrupted=1, media_queries=6, media_hits=2, sleep_level=1,
        adapter_slots=4, adapters_running=("a", "b"), adapters_waiting=("c",), histograms=counts,
    )  # fmt: skip
    text = metrics.Metrics("m").render(stats).decode()
    both = 'engine="0",model_name="m"'
    for line in (
        f'vllm:num_requests_waiting_by_reason{{{both},reason="capacity"}} 3.0',
        f'vllm:num_requests_waiting_by_reason{{{both},reason="deferred"}} 2.0',
        f'vllm:prompt_tokens_by_source_total{{{both},source="local_compute"}} 7.0',
        f'vllm:prompt_tokens_by_source_total{{{both},source="local_cache_hit"}} 3.0',
        f'vllm:prompt_tokens_by_source_total{{{both},source="external_kv_transfer"}} 4.0',
        f'vllm:engine_sleep_state{{{both},sleep_state="awake"}} 0.0',
        f'vllm:engine_sleep_state{{{both},sleep_state="kv_cache_discarded"}} 1.0',
        f"vllm:corrupted_requests_total{{{both}}} 1.0",
        f"vllm:mm_cache_queries_total{{{both}}} 6.0",
        f"vllm:mm_cache_hits_total{{{both}}} 2.0",
        'vllm:lora_requests_info{max_lora="4",running_lora_adapters="a,b",waiting_lora_adapters="c"}',
        f"vllm:iteration_tokens_total_bucket{{{both.replace(',', chr(44) + 'le=' + chr(34) + '8.0' + chr(34) + chr(44))}}} 2.0",
        f"vllm:iteration_tokens_total_count{{{both}}} 3.0",
        f"vllm:iteration_tokens_total_sum{{{both}}} 40.0",
    ):
        assert line in text, line


async def test_answers_that_are_looked_through_for_calls_are_counted() -> None:
    async with toy_server(Scripted("no calls here"), text=text_side()) as toy:
        for stream in (False, True):
            for tools in ([TOOL], None):
                await toy.chat(tools=tools, stream=stream, max_tokens=64)
            await toy.http.post(
                "/v1/responses", json={"input": "hi", "tools": [{"type": "function", **TOOL["function"]}], "stream": stream}
            )
        text = (await toy.http.get("/metrics")).text
    for protocol in ("chat_completions", "responses"):
        for mode in ("streaming", "non_streaming"):
            labels = f'mode="{mode}",model_name="toy",outcome="no_tool_call",request_type="{protocol}"'
            assert f"vllm:tool_call_parser_invocations_total{{{labels}}} 1.0" in text
