"""The whole engine on a device that computes nothing: every kind of step is planned, packed, padded, replayed and committed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from pagoda.serving.engine.build import engine_starter
from pagoda.serving.engine.inprocess_client import InProcessClient
from pagoda.serving.engine.messages import EngineRequest
from tiny import tiny_config
from toy import toy_request


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[InProcessClient]:
    config = tiny_config(tmp_path, device="null:h200", num_gpu_blocks_override=None, max_num_seqs=32, max_num_batched_tokens=128)
    made = await InProcessClient.start(engine_starter(config))
    yield made
    await made.close()


async def ask(client: InProcessClient, request: EngineRequest) -> list[int]:
    return [token async for delta in client.generate(request) for sequence in delta.sequences for token in sequence.token_ids]


async def test_chunks_decodes_and_every_setting(client: InProcessClient) -> None:
    settings = [
        {},
        {"temperature": 1.0},
        {"top_k": 3, "temperature": 1.0},
        {"presence_penalty": 1.0},
        {"logprobs": 2},
        {"logit_bias": {3: 1.0}},
    ]
    requests = [toy_request(str(i), [5] * (3 + 40 * i), 9, **settings[i % len(settings)]) for i in range(10)]
    answers = await asyncio.gather(*(ask(client, request) for request in requests))
    assert answers == [[0] * 9] * 10
    stats = await client.stats()
    assert stats.pages_used == 0 and stats.generation_tokens == 90


async def test_the_device_of_the_plan_is_the_one_named(client: InProcessClient) -> None:
    assert client.facts.device == "h200" and client.facts.num_pages > 1_000_000
    assert (await client.call("memory"))[0]["kv"] > 100 * 2**30
