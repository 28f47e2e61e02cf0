"""The whole engine, from configuration to deltas, against transformers' own generation: greedy, samples and beams in one mixed load,
with prefix hits and chunks, and with a pool so small that requests are preempted."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from pagoda.hal.discovery import INSTRUMENTS, find_all
from pagoda.serving.engine.build import engine_starter
from pagoda.serving.engine.config import EngineConfig
from pagoda.serving.engine.inprocess_client import InProcessClient
from pagoda.serving.engine.messages import EngineRequest, EngineStats
from pagoda.serving.engine.params import SamplingParams
from tiny_checkpoints import make

DEVICES = ["reference", *(one.name for one in find_all() if one.probe.available and one.name not in INSTRUMENTS)]
EOS, BEAMS = 2, 3
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
STATES = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 6, "mamba_chunk_size": 8}
STATES_ALONE = {"Mamba2"}  # a sequence that is let in needs no more pages, however long it grows
UNCACHED = {"MiniMax"}  # transformers' cache of it leaves the linear layers' states where they were when beams change places
FAMILIES: dict[str, tuple[dict[str, Any], int]] = {
    "Llama": ({}, 16),
    "Mistral": ({"sliding_window": 20}, 12),
    "Mamba2": ({"state_size": 6, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 8}, 6),
    "Bamba": ({"num_hidden_layers": 3, "attn_layer_indices": [1], **STATES}, 20),
    "Jamba": ({"num_hidden_layers": 4, "attn_layer_period": 4, "attn_layer_offset": 1, "mamba_d_state": 6, **EXPERTS}, 24),
    "Lfm2": ({"num_hidden_layers": 3, "full_attn_idxs": [1], "block_multiple_of": 16}, 20),
    "MiniMax": ({"num_hidden_layers": 3, "num_local_experts": 4, "num_experts_per_tok": 2, "mlp_alpha_factor": 1.3}, 20),
    "Qwen3Next": ({"num_hidden_layers": 4, "head_dim": 16, "moe_intermediate_size": 24, **DELTA, **EXPERTS}, 20),
    "Gemma3": ({"architectures": ["Gemma3ForCausalLM"], "num_hidden_layers": 7, "sliding_window": 16, "head_dim": 8}, 60),
}


def requests() -> list[EngineRequest]:
    shared = list(range(20, 60))
    plain = [greedy(f"r{i}", [*shared[: 40 - 2 * i], 70 + i], 30) for i in range(6)]
    beams = [
        EngineRequest(f"b{i}", tuple(shared[i : 20 + i]), SamplingParams(temperature=0, max_tokens=12, n=2), (EOS,), beam_width=BEAMS)
        for i in range(2)
    ]
    return [*plain[:3], *beams, *plain[3:], greedy("n", shared, 12, n=3)]


def greedy(name: str, prompt: list[int], max_tokens: int, n: int = 1) -> EngineRequest:
    return EngineRequest(name, tuple(prompt), SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, n=n), (EOS,))


async def serve(config: EngineConfig) -> tuple[dict[str, dict[int, list[int]]], EngineStats]:
    client = await InProcessClient.start(engine_starter(config))
    try:

        async def one(request: EngineRequest) -> dict[int, list[int]]:
            heard: dict[int, list[int]] = {}
            async for delta in client.generate(request):
                for part in delta.sequences:
                    heard.setdefault(part.index, []).extend(part.token_ids)
            return heard

        asked = requests()
        answers = await asyncio.gather(*map(one, asked))
        return {request.request_id: answer for request, answer in zip(asked, answers, strict=True)}, await client.stats()
    finally:
        await client.close()


def expected(model: torch.nn.Module, request: EngineRequest, use_cache: bool) -> list[list[int]]:
    """One list per sequence; transformers pads ended beams with 0."""
    ids = torch.tensor([request.prompt])
    how: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0, "use_cache": use_cache}
    how["max_new_tokens"] = request.params.max_tokens
    if request.beam_width:
        how |= {"num_beams": BEAMS, "num_return_sequences": request.params.n, "length_penalty": 1.0, "eos_token_id": EOS}
    else:
        model.generation_config.eos_token_id = None
    rows = model.generate(ids, **how)[:, len(request.prompt) :].tolist()
    return [row[: row.index(EOS) + 1] if EOS in row and request.beam_width else row for row in rows]


@pytest.mark.heavy
@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("device", DEVICES)
def test_a_mixed_load_is_what_transformers_generates(tmp_path: Path, device: str, family: str) -> None:
    values, few = FAMILIES[family]
    model = make(tmp_path, values.get("architectures", [family])[0], **values)
    sizes = {"max_model_len": 100, "max_num_seqs": 6, "max_num_batched_tokens": 24, "block_size": 16}
    for pages in (few, 300):
        config = EngineConfig(model=str(tmp_path), device=device, dtype="float32", num_gpu_blocks_override=pages, **sizes)
        heard, stats = asyncio.run(serve(config))
        assert stats.pages_used == 0 and stats.prefix_hits > 0
        assert (stats.preemptions > 0) == (pages == few and family not in STATES_ALONE)
        for request in requests():
            want = expected(model, request, family not in UNCACHED)
            assert heard[request.request_id] == dict(enumerate(want * (request.params.n if len(want) == 1 else 1)))
