"""Outputs under a grammar are its schema's, whole engine: sampled, several a request, with drafts and without, by either library; what
the grammar forces takes no steps, and changes nothing."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from grammar_walk import sample_tokenizer, schema
from pagoda.serving.engine.messages import EngineStats
from pagoda.serving.engine.params import SamplingParams
from pagoda.serving.frontend.structured.guidance_backend import GuidanceMatcher
from pagoda.serving.frontend.structured.xgrammar_backend import XMatcher
from pagoda.serving.sdk import AsyncLLM
from tiny import CONFIG

DRAFTS = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 2, "prompt_lookup_min": 1}


def settings(folder: Path, backend: str, drafts: bool) -> dict[str, Any]:
    tokenizer = sample_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps(CONFIG | {"vocab_size": tokenizer.vocab_size + 10, "eos_token_id": 1}))
    return {
        "model": str(folder),
        "device": "cpu",
        "load_format": "dummy",
        "use_tqdm_on_load": False,
        "max_num_seqs": 16,
        "num_gpu_blocks_override": 300,
        "structured_outputs_config": {"backend": backend},
        "speculative_config": DRAFTS if drafts else None,
    }


async def outputs(llm: AsyncLLM, seeds: range) -> list[tuple[dict[str, Any], list[tuple[str, str | None, tuple[int, ...]]]]]:
    """Schemas with the answers of a request each: texts, why they ended, tokens."""
    out = []
    for seed in seeds:
        made = schema(random.Random(seed))
        asked = {"json": made, "disable_any_whitespace": seed % 2 == 0}
        params = SamplingParams(n=3, temperature=1.0, seed=seed, max_tokens=200, structured_outputs=asked, skip_special_tokens=False)
        grown = [output async for output in llm.generate({"prompt_token_ids": [5, 6, 7, 5, 6]}, params)]
        out.append((made, [(one.text, one.finish_reason, tuple(one.token_ids)) for one in grown[-1].outputs]))
    return out


@pytest.mark.heavy
@pytest.mark.parametrize("backend", ["auto", "guidance"])
async def test_all_that_ends_validates_and_drafts_change_nothing(backend: str, tmp_path: Path) -> None:
    found, accepted = [], 0
    for drafts in (False, True):
        async with AsyncLLM(**settings(tmp_path, backend, drafts)) as llm:
            found.append(await outputs(llm, range(24)))
            accepted = (await llm.session.client.stats()).accepted_tokens
    assert found[0] == found[1]
    assert accepted > 0
    ended = [(made, text) for made, answers in found[0] for text, reason, _ in answers if reason == "stop"]
    for made, text in ended:
        jsonschema.validate(json.loads(text.removesuffix("</s>")), made)
    assert len(ended) > 36


FORCING = {
    "type": "object",
    "properties": {"temperature": {"enum": [1, 2]}, "kind of weather": {"const": "hail, then rain"}},
    "required": ["temperature", "kind of weather"],
}
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 3, "presence_penalty": 0.7, "repetition_penalty": 1.3},
    {"temperature": 1.0, "seed": 5, "n": 3, "frequency_penalty": 0.5},
    {"temperature": 0.8, "seed": 6, "stop": ["hail"], "min_tokens": 2, "logprobs": 0},
    {"temperature": 0.0, "max_tokens": 9, "bad_words": ["rain"]},
    {"temperature": 1.0, "seed": 7, "n": 3, "top_p": 0.9},
]


async def forced_answers(folder: Path, backend: str, schema: dict[str, Any]) -> tuple[list[Any], EngineStats]:
    """What each of `KINDS` gives, asked one after the other, and the engine's counters."""
    asked, out = {"json": schema, "disable_any_whitespace": True}, []
    async with AsyncLLM(**settings(folder, backend, drafts=False)) as llm:
        for kind in KINDS:
            params = SamplingParams(**{"max_tokens": 120, "structured_outputs": asked} | kind)
            grown = [output async for output in llm.generate({"prompt_token_ids": [5, 6, 7, 5, 6]}, params)]
            out.append([(one.text, one.finish_reason, one.stop_reason, list(one.token_ids), told(one)) for one in grown[-1].outputs])
        return out, await llm.session.client.stats()


def told(output: Any) -> list[dict[int, tuple[int, float]]] | None:
    """Ranks and logprobs, but for what sums of another order of rows change."""
    if output.logprobs is None:
        return None
    return [{token: (each.rank, round(each.logprob, 3)) for token, each in place.items()} for place in output.logprobs]


@pytest.mark.parametrize("backend", ["xgrammar", "guidance"])
async def test_what_is_forced_takes_no_steps_and_changes_nothing(backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jumping, fast = await forced_answers(tmp_path, backend, FORCING)
    for matcher in (XMatcher, GuidanceMatcher):
        monkeypatch.setattr(matcher, "forced", lambda self: [])
    stepping, slow = await forced_answers(tmp_path, backend, FORCING)
    assert jumping == stepping
    assert any("hail, then rain" in text for answers in jumping for text, *_ in answers)
    assert slow.jumped_tokens == 0 < fast.jumped_tokens
    assert fast.steps < 0.5 * slow.steps and fast.drafts == fast.draft_tokens == 0


@pytest.mark.heavy
@pytest.mark.parametrize("backend", ["auto", "guidance"])
async def test_jumps_change_no_token_of_any_schema(backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with AsyncLLM(**settings(tmp_path, backend, drafts=False)) as llm:
        jumping = await outputs(llm, range(100, 124))
        jumped = (await llm.session.client.stats()).jumped_tokens
        for matcher in (XMatcher, GuidanceMatcher):
            monkeypatch.setattr(matcher, "forced", lambda self: [])
        assert await outputs(llm, range(100, 124)) == jumping
        assert (await llm.session.client.stats()).jumped_tokens == jumped > 0
