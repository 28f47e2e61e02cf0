"""Outputs under a grammar are its schema's, whole engine: sampled, several a request, with drafts and without, by either library."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from grammar_walk import sample_tokenizer, schema
from pagoda.serving.engine.params import SamplingParams
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
