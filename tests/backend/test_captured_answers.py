"""Captures ahead of need change no answer: a step as it is, through a larger capture and captured; adapters, drafts, pieces, ranks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from captured_chip import install
from lora_folders import make_adapter, modules_of
from pagoda.hal.comm import Topology
from pagoda.hal.discovery import INSTRUMENTS, find_all
from pagoda.serving.engine.batch import Bucket
from pagoda.serving.engine.build import build_runner, engine_starter
from pagoda.serving.engine.capture_plan import Job
from pagoda.serving.engine.config import EngineConfig
from pagoda.serving.engine.inprocess_client import InProcessClient
from pagoda.serving.engine.messages import EngineRequest
from pagoda.serving.engine.pages import Pages
from pagoda.serving.engine.params import SamplingParams
from pagoda.serving.engine.plan import StepResult
from pagoda.serving.engine.runner import Runner
from pagoda.serving.engine.settings import Use
from plans import Hand, Sequence
from tiny_checkpoints import make

FIRST = next(one.name for one in find_all() if one.probe.available and one.name not in INSTRUMENTS)
SIZES: dict[str, Any] = {
    "max_num_seqs": 12, "max_num_batched_tokens": 64, "max_model_len": 256, "block_size": 16, "num_gpu_blocks_override": 260,
    "use_tqdm_on_load": False,
}  # fmt: skip
KINDS: dict[str, list[dict[str, Any]]] = {
    "sampled inside": [{"temperature": 0}, {"temperature": 1.0, "seed": 3}, {"temperature": 0.8, "seed": 4, "top_p": 0.9}],
    "behind the step": [{"temperature": 0, "logprobs": 3}, {"temperature": 0.8, "seed": 4, "top_p": 0.9, "logprobs": 3}],
}
PROMPTS = [tuple(range(20 + n, 33 + 3 * n)) for n in range(5)]


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The device here if it captures ahead of need, else one made of the CPU."""
    if FIRST != "cpu":
        yield FIRST
        return
    folder = tmp_path_factory.mktemp("plugin")
    name = install(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield name


class Way:
    """A runner whose steps are all `as they are`, `captured`, or, if they are small, run through a `larger` capture."""

    def __init__(self, config: EngineConfig, name: str) -> None:
        self.runner, self.name = build_runner(config, Topology(0, 1)), name
        self.captured = self.runner._captured
        if name == "as they are":
            self.captured.clear()
            self.captured._end()
        for rows in (16, 4) if name == "larger" else ():
            self.runner._record(Job(Bucket(rows, rows), use=Use.BIAS | Use.RANDOM | Use.FILTER))
        self.started = self.captured.counts.captured
        self.grown = 0
        self._bucket, self.captured.bucket = self.captured.bucket, self._watched  # type: ignore[method-assign]

    def _watched(self, plan: Any, use: int = 0) -> Any:
        found = self._bucket(plan, use)
        policy = self.runner.device.graphs.policy
        self.grown += found is not None and plan.num_tokens == plan.num_rows and found.rows > policy.row_bucket(plan.num_rows)
        return found

    def took(self) -> bool:
        counts = self.captured.counts
        match self.name:
            case "as they are":
                return counts.captured == 0
            case "larger":
                return counts.captured == self.started and self.grown > 0
        return counts.captured > self.started


def lives(runner: Runner, kinds: list[dict[str, Any]], capture: bool) -> list[Any]:
    """Prompts together, decodes of fewer and fewer rows, a burst, a prompt beside decodes: tokens, with all numbers that came with them."""
    hand, heard = Hand(runner), list[Any]()
    rows = [
        hand.sequence(slot, list(tokens), SamplingParams(max_tokens=64, ignore_eos=True, **kinds[slot % len(kinds)]))
        for slot, tokens in enumerate(PROMPTS)
    ]

    def run(*parts: tuple[Sequence, int]) -> None:
        heard.append(_numbers(hand.run(*parts, capture=capture)))

    run(*((row, len(row.tokens)) for row in rows[:4]))
    for count in (4, 3, 2, 1, 3):
        run(*((row, 1) for row in rows[:count]))
    run((rows[4], len(rows[4].tokens)), *((row, 1) for row in rows[:3]))
    if runner.facts.burst_steps > 1 and "logprobs" not in kinds[0]:
        heard.append(hand.burst(rows[:3], [2, 1, 2]).tokens.tolist())
    run(*((row, 1) for row in rows[:5]))
    return heard


def _numbers(result: StepResult) -> Any:
    logprobs = {row: [array.tolist() for array in given] for row, given in result.logprobs.items()}
    return result.tokens.tolist(), logprobs


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("graphs", ["full", "piecewise"])
def test_fixed_kernels_give_the_same_bits_whichever_way_a_step_runs(device: str, tmp_path: Path, kind: str, graphs: str) -> None:
    make(tmp_path, "Qwen3", head_dim=16, max_position_embeddings=256)
    config = EngineConfig(model=str(tmp_path), device=device, dtype="bfloat16", batch_invariant=True, graphs=graphs, **SIZES)  # type: ignore[arg-type]
    answers = {}
    for name in ("as they are", "larger", "captured"):
        way = Way(config, name)
        answers[name] = lives(way.runner, KINDS[kind], capture=name == "captured")
        assert way.took(), name
        way.runner.close()
    assert answers["larger"] == answers["as they are"] == answers["captured"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("captured")
    make(root / "base", "Llama", max_position_embeddings=256)
    return {"base": root / "base", "adapter": make_adapter(root / "adapter", modules_of(root / "base"), 1)}


def asked(name: str, adapter: str | None) -> list[EngineRequest]:
    """Requests of several kinds; prompts that say the same again, so that drafts are found."""
    again = (5, 17, 80, 3, 44) * 4
    prompts = (again, (90, 4, 6, 31), *PROMPTS[:3])
    settings = (
        {"temperature": 0},
        {"temperature": 1.0, "seed": 3},
        {"temperature": 0, "logit_bias": {7: 2.0}},
        {"temperature": 0},
        {"temperature": 0},
    )
    params = [SamplingParams(max_tokens=12, ignore_eos=True, **one) for one in settings]  # type: ignore[arg-type]
    adapters = (None, adapter, adapter, None, adapter)
    named = zip(prompts, params, adapters, strict=True)
    return [EngineRequest(f"{name}-{n}", prompt, one, (2,), adapter=given) for n, (prompt, one, given) in enumerate(named)]


async def waves(config: EngineConfig, adapter: str | None) -> list[list[list[int]]]:
    """Answers before captures are made ahead of need, after all of them, and after a sleep."""
    client = await InProcessClient.start(engine_starter(config))
    try:

        async def ask(one: EngineRequest) -> list[int]:
            return [token async for delta in client.generate(one) for part in delta.sequences for token in part.token_ids]

        heard = []
        for name in ("before", "after", "woken"):
            heard.append([list(each) for each in await asyncio.gather(*map(ask, asked(name, adapter)))])
            if name == "before":
                while (await client.stats()).steps_to_capture:
                    await asyncio.sleep(0.02)
            else:
                await client.call("sleep", level=1)
                await client.call("wake")
        return heard
    finally:
        await client.close()


FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "in pieces": {"graphs": "piecewise"},
    "drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}},
    "adapters": {"enable_lora": True, "max_lora_rank": 8},
    "two ranks": {"tensor_parallel_size": 2},
}


@pytest.mark.parametrize("feature", [name if name != "two ranks" else pytest.param(name, marks=pytest.mark.heavy) for name in FEATURES])
async def test_answers_are_those_without_captures(device: str, folders: dict[str, Path], feature: str) -> None:
    adapter = "tuned" if feature == "adapters" else None
    settings = FEATURES[feature] | ({"lora_modules": (f"tuned={folders['adapter']}",)} if adapter else {})
    config = EngineConfig(model=str(folders["base"]), device=device, dtype="float32", **(SIZES | settings))
    expected, *_ = await waves(replace(config, graphs="none"), adapter)
    assert await waves(config, adapter) == [expected] * 3


async def test_captures_of_recurrent_steps_write_no_request_s_state(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor do they keep a copy of all requests' states, for which there may be no room: only page 0 is written, and put back."""
    sizes = {"head_dim": 16, "num_heads": 4, "expand": 2, "n_groups": 1, "state_size": 16, "num_hidden_layers": 2}
    make(tmp_path, "Mamba2", **sizes)
    config = EngineConfig(model=str(tmp_path), device=device, dtype="float32", **SIZES)
    apart, kept = Pages.states_apart, list[bool]()

    @contextmanager
    def watched(pages: Pages, tables: Any) -> Iterator[None]:
        assert pages.pool is not None
        pages.pool[0] = 3
        before = pages.pool.clone(), tables[-1].clone()
        with apart(pages, tables):
            yield
        kept.append(torch.equal(pages.pool, before[0]) and torch.equal(tables[-1], before[1]))
        pages.pool[0].zero_()

    monkeypatch.setattr(Pages, "states_apart", watched)
    expected, *_ = await waves(replace(config, graphs="none"), None)
    assert kept == []
    assert await waves(config, None) == [expected] * 3
    assert kept and all(kept)
