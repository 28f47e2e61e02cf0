"""Two ranks over gloo give one rank's tokens; the whole engine against transformers; sleep and wake with the weights."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from pagoda.serving.engine.build import engine_starter
from pagoda.serving.engine.config import EngineConfig
from pagoda.serving.engine.inprocess_client import InProcessClient
from pagoda.serving.engine.messages import EngineRequest
from tiny import CONFIG, tiny_config
from toy import toy_request

PROMPTS = [[5, 17, 80, 3, 44, 9, 61, 200, 33, 70, 12, 8, 25], [90, 4, 6, 31], list(range(3, 90))]


async def ask(client: InProcessClient, request: EngineRequest) -> list[int]:
    return [token async for delta in client.generate(request) for sequence in delta.sequences for token in sequence.token_ids]


async def answers(config: EngineConfig, count: int = 12) -> list[list[int]]:
    client = await InProcessClient.start(engine_starter(config))
    try:
        requests = [toy_request(str(i), prompt, count) for i, prompt in enumerate(PROMPTS)]
        return list(await asyncio.gather(*(ask(client, request) for request in requests)))
    finally:
        await client.close()


@pytest.mark.heavy
@pytest.mark.parametrize("device", ["cpu", "reference"])
async def test_two_ranks_give_one_ranks_tokens(tmp_path: Path, device: str) -> None:
    one = await answers(tiny_config(tmp_path, device=device))
    two = await answers(tiny_config(tmp_path, device=device, tensor_parallel_size=2))
    assert one == two


@pytest.mark.parametrize("device", ["cpu", "reference"])
async def test_the_engine_gives_transformers_tokens(tmp_path: Path, device: str) -> None:
    torch.manual_seed(3)
    settings = {key: value for key, value in CONFIG.items() if key not in ("architectures", "model_type", "torch_dtype")}
    model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings, initializer_range=0.3))
    model.float().eval()
    model.save_pretrained(tmp_path / "saved")
    expected = []
    for prompt in PROMPTS:
        with torch.no_grad():
            out = model.generate(torch.tensor([prompt]), max_new_tokens=12, min_new_tokens=12, do_sample=False, pad_token_id=0)
        expected.append(out[0, len(prompt) :].tolist())
    got = await answers(
        EngineConfig(model=str(tmp_path / "saved"), device=device, max_num_seqs=8, max_num_batched_tokens=32, num_gpu_blocks_override=200)
    )
    assert got == expected


async def test_sleep_drops_the_weights_too_and_wake_reads_them_again(tmp_path: Path) -> None:
    client = await InProcessClient.start(engine_starter(tiny_config(tmp_path, device="reference")))
    before = await ask(client, toy_request("a", PROMPTS[0]))
    (held,) = await client.call("memory")
    await client.call("sleep", level=2)
    (asleep,) = await client.call("memory")
    assert held["weights"] > 0 and (asleep["kv"], asleep["weights"]) == (0, 0)
    await client.call("wake")
    assert (await client.call("memory"))[0] == held
    assert await ask(client, toy_request("b", PROMPTS[0])) == before
    await client.close()
