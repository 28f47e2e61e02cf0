"""Adapters in a batch give what models with merged weights give: alone, together, in chunks, after preemption, on two ranks."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from lora_folders import make_adapter, merged, modules_of
from pagoda.hal.errors import RequestError
from pagoda.serving.engine.build import engine_starter
from pagoda.serving.engine.config import EngineConfig
from pagoda.serving.engine.inprocess_client import InProcessClient
from pagoda.serving.engine.messages import EngineRequest, EngineStats
from pagoda.serving.engine.params import SamplingParams
from pagoda.serving.frontend.lora import LoRARequest
from pagoda.serving.sdk import LLM
from tiny_checkpoints import make

SHARED = tuple(range(20, 60))
PROMPTS = [(5, 17, 80, 3, 44, 9, 61, 100, 33, 70, 12, 8, 25), (90, 4, 6, 31), (*SHARED, 70), (*SHARED, 71, 72)]
COUNT = 20
SIZES: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 12, "max_num_batched_tokens": 24, "max_model_len": 100, "block_size": 16}


def request(name: str, prompt: tuple[int, ...], adapter: str | None) -> EngineRequest:
    params = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True, logprobs=2)
    return EngineRequest(name, prompt, params, (2,), adapter=adapter)


Heard = list[tuple[int, float]]


async def ask(client: InProcessClient, one: EngineRequest) -> Heard:
    heard: Heard = []
    async for delta in client.generate(one):
        for part in delta.sequences:
            heard += [(entry.token_id, entry.logprob) for entry in part.logprobs or ()]
    return heard


async def serve(config: EngineConfig, asked: list[EngineRequest]) -> tuple[dict[str, Heard], EngineStats]:
    client = await InProcessClient.start(engine_starter(config))
    try:
        answers = await asyncio.gather(*(ask(client, one) for one in asked))
        return {one.request_id: answer for one, answer in zip(asked, answers, strict=True)}, await client.stats()
    finally:
        await client.close()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model, two adapters (one of all modules, one of some with rank-stabilised scaling), and the model merged with each."""
    root = tmp_path_factory.mktemp("adapters")
    make(root / "base", "Llama")
    a = make_adapter(root / "a", modules_of(root / "base"), 1)
    b = make_adapter(root / "b", modules_of(root / "base", ("q_proj", "v_proj", "down_proj")), 2, rank=7, use_rslora=True)
    return {
        "base": root / "base",
        "a": a,
        "b": b,
        "merged_a": merged(root / "base", a, root / "ma"),
        "merged_b": merged(root / "base", b, root / "mb"),
    }


def config(folders: dict[str, Path], device: str, pages: int = 300, **settings: Any) -> EngineConfig:
    modules = tuple(f"{name}={folders[name]}" for name in "ab")
    values = {"enable_lora": True, "lora_modules": modules, "max_loras": 2, "num_gpu_blocks_override": pages, **SIZES, **settings}
    return EngineConfig(model=str(folders["base"]), device=device, **values)


def mixed() -> list[EngineRequest]:
    return [request(f"{adapter}{i}", prompt, adapter) for i, prompt in enumerate(PROMPTS) for adapter in ("a", "b", None)]


@pytest.fixture(scope="module")
def truth(folders: dict[str, Path]) -> dict[str, Heard]:
    """Answers of merged models, each alone in its engine."""
    found: dict[str, Heard] = {}
    for adapter, folder in (("a", "merged_a"), ("b", "merged_b"), (None, "base")):
        plain = EngineConfig(model=str(folders[folder]), device="reference", num_gpu_blocks_override=300, **SIZES)
        asked = [request(f"{adapter}{i}", prompt, None) for i, prompt in enumerate(PROMPTS)]
        found |= asyncio.run(serve(plain, asked))[0]
    assert len({tuple(token for token, _ in found[f"{adapter}0"]) for adapter in ("a", "b", None)}) == 3
    return found


def same(heard: dict[str, Heard], truth: dict[str, Heard]) -> bool:
    for name, answer in heard.items():
        assert [token for token, _ in answer] == [token for token, _ in truth[name]], name
        assert max(abs(have - want) for (_, have), (_, want) in zip(answer, truth[name], strict=True)) < 2e-3, name
    return True


@pytest.mark.parametrize("device", ["cpu", "reference"])
@pytest.mark.parametrize(("pages", "slots"), [(300, 2), (300, 1), (16, 2)])
def test_a_mixed_batch_is_what_merged_models_answer(
    folders: dict[str, Path], truth: dict[str, Heard], device: str, pages: int, slots: int
) -> None:
    heard, stats = asyncio.run(serve(config(folders, device, pages, max_loras=slots), mixed()))
    assert same(heard, truth)
    assert (stats.preemptions > 0) == (pages == 16) and stats.pages_used == 0


def test_prefix_hits_stay_within_an_adapter(folders: dict[str, Path], truth: dict[str, Heard]) -> None:
    async def run() -> None:
        client = await InProcessClient.start(engine_starter(config(folders, "cpu")))
        hits = []
        for _ in range(2):
            for adapter in ("a", "b", None):
                heard = await ask(client, request(f"{adapter}2", PROMPTS[2], adapter))
                assert same({f"{adapter}2": heard}, truth)
                hits.append((await client.stats()).prefix_hits)
        await client.close()
        assert hits == [0, 0, 0, 32, 64, 96]

    asyncio.run(run())


def test_rows_without_adapter_keep_their_bits(folders: dict[str, Path]) -> None:
    plain = EngineConfig(model=str(folders["base"]), device="cpu", num_gpu_blocks_override=300, **SIZES)
    alone, _ = asyncio.run(serve(plain, [one for one in mixed() if one.adapter is None]))
    beside, _ = asyncio.run(serve(config(folders, "cpu"), mixed()))
    assert all(beside[name] == answer for name, answer in alone.items())


@pytest.mark.heavy
@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_two_ranks_answer_the_same(folders: dict[str, Path], truth: dict[str, Heard], device: str) -> None:
    heard, _ = asyncio.run(serve(config(folders, device, tensor_parallel_size=2), mixed()))
    assert same(heard, truth)


def test_the_sdk_loads_what_it_is_asked_for(folders: dict[str, Path], truth: dict[str, Heard]) -> None:
    asked = [LoRARequest("a", 1, str(folders["a"])), None, LoRARequest("b", 2, str(folders["b"]))]
    with LLM(
        str(folders["base"]), enable_lora=True, max_cpu_loras=1, skip_tokenizer_init=True, num_gpu_blocks_override=300, **SIZES
    ) as llm:
        params = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True)
        for _ in range(2):
            outputs = llm.generate([list(PROMPTS[0])] * 3, params, lora_request=asked)
            for name, output in zip(("a0", "None0", "b0"), outputs, strict=True):
                assert output.outputs[0].token_ids == [token for token, _ in truth[name]]
        with pytest.raises(RequestError, match="adapter_config"):
            llm.generate([5, 6], params, lora_request=LoRARequest("c", 3, str(folders["base"])))
