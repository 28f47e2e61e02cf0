"""A budget of thoughts in the whole engine: they are a plain run's up to the budget, then their mark comes, then whatever the form allows;
sampled, several a request, beside others, with drafts and without."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from grammar_walk import sample_tokenizer
from pagoda.hal.errors import RequestError
from pagoda.serving.engine.params import SamplingParams
from pagoda.serving.engine.structured import StructuredOutputsParams, Thinking
from pagoda.serving.sdk import AsyncLLM
from tiny import CONFIG

DRAFTS = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
SCHEMA = {"type": "object", "properties": {"kind": {"enum": ["rain", "snow"]}, "n": {"enum": [1, 2]}}, "required": ["kind", "n"]}
MARKS = ("<think>", "</think>")
LONG = 400


def settings(folder: Path, special: bool, **changes: Any) -> dict[str, Any]:
    """A tiny model whose marks are tokens of their own, or are spelled."""
    tokenizer = sample_tokenizer(folder, MARKS if special else ())
    (folder / "config.json").write_text(json.dumps(CONFIG | {"vocab_size": tokenizer.vocab_size + 10, "eos_token_id": 1}))
    base = {"model": str(folder), "device": "cpu", "load_format": "dummy", "use_tqdm_on_load": False, "max_num_seqs": 16}
    return {**base, "num_gpu_blocks_override": 300, **changes}


def params(budget: int | None, seed: int, form: dict[str, Any] | None = None, **more: Any) -> SamplingParams:
    asked = None
    if budget is not None:
        thinking = Thinking(MARKS[:1], MARKS[1:], True, budget)
        asked = StructuredOutputsParams(**(form or {"free": True}), thinking=thinking)
    given = {"temperature": 1.0, "max_tokens": 60, "ignore_eos": form is None, "skip_special_tokens": False, "n": 2} | more
    return SamplingParams(seed=seed, structured_outputs=asked, **given)


async def ask(llm: AsyncLLM, asked: SamplingParams, place: int) -> list[list[int]]:
    prompt = [5, 6, 7, 5, 6, 8 + place]
    grown = [output async for output in llm.generate({"prompt_token_ids": prompt}, asked)]
    return [list(one.token_ids) for one in grown[-1].outputs]


async def answers(llm: AsyncLLM, budgets: list[int | None], form: dict[str, Any] | None = None, **more: Any) -> list[list[list[int]]]:
    """All at once, so that rows with a budget, with others, and without one share steps."""
    return await asyncio.gather(*(ask(llm, params(budget, 40 + i, form, **more), i) for i, budget in enumerate(budgets)))


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("special", [True, False])
async def test_thoughts_are_a_plain_runs_up_to_the_budget(special: bool, drafts: bool, tmp_path: Path) -> None:
    budgets: list[int | None] = [0, 1, 7, None, 20, 33, 41, None]
    config = {"speculative_config": DRAFTS if drafts else None}
    async with AsyncLLM(**settings(tmp_path, special, **config)) as llm:
        mark = sample_tokenizer(tmp_path, MARKS if special else ()).encode(MARKS[1], add_special_tokens=False)
        plain = await answers(llm, [None] * len(budgets))
        found = await answers(llm, budgets)
    assert (len(mark) == 1) == special
    for budget, one, other in zip(budgets, plain, found, strict=True):
        for tokens, own in zip(other, one, strict=True):
            if budget is None:
                assert tokens == own
                continue
            early = next((at for at in range(budget) if own[at : at + len(mark)] == mark), None)
            assert early is None, "the seed of another test"
            assert tokens[:budget] == own[:budget]
            assert tokens[budget : budget + len(mark)] == mark and len(tokens) == 60


@pytest.mark.heavy
@pytest.mark.parametrize("drafts", [False, True])
async def test_a_schema_follows_the_thoughts(drafts: bool, tmp_path: Path) -> None:
    budgets: list[int | None] = [0, 5, 12, 30]
    config = {"speculative_config": DRAFTS if drafts else None}
    async with AsyncLLM(**settings(tmp_path, True, **config)) as llm:
        tokenizer = sample_tokenizer(tmp_path, MARKS)
        [mark] = tokenizer.encode(MARKS[1], add_special_tokens=False)
        found = await answers(llm, budgets, {"json": SCHEMA, "disable_any_whitespace": True}, max_tokens=LONG)
    for budget, outputs in zip(budgets, found, strict=True):
        for tokens in outputs:
            assert budget is not None and tokens.index(mark) <= budget
            jsonschema.validate(json.loads(tokenizer.decode(tokens[tokens.index(mark) + 1 :]).removesuffix("</s>")), SCHEMA)


async def test_drafts_and_budgets_change_no_token(tmp_path: Path) -> None:
    budgets: list[int | None] = [3, 9, None, 15]
    found, accepted = [], 0
    for drafts in (None, DRAFTS):
        async with AsyncLLM(**settings(tmp_path, True, speculative_config=drafts)) as llm:
            found.append(await answers(llm, budgets, temperature=0.0, n=1))
            accepted = (await llm.session.client.stats()).accepted_tokens
    assert found[0] == found[1] and accepted > 0


async def test_the_sdk_takes_a_budget(tmp_path: Path) -> None:
    given = settings(tmp_path, True)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": "{{ messages[0].content }}<think>\n"}))
    asked = {"max_tokens": 30, "ignore_eos": True, "skip_special_tokens": False, "seed": 5}
    async with AsyncLLM(**given) as llm:
        async for output in llm.generate("Hm<think>", SamplingParams(thinking_token_budget=6, **asked)):
            one = output.outputs[0]
        assert sample_tokenizer(tmp_path, MARKS).encode(MARKS[1], add_special_tokens=False) == [one.token_ids[6]]
        with pytest.raises(RequestError, match="thinking_token_budget=-1"):
            SamplingParams(thinking_token_budget=-1)
