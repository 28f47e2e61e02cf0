"""Ropes that follow a request's length, through the engine: chunks, shared prefixes and growth give what transformers computes anew."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from pagoda import LLM, SamplingParams
from pagoda.models.model import LengthEpochs
from tiny_checkpoints import logits, make
from tokenizers import Tokenizer, models

LONG = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 3.0, 6.0, 9.0],
    "original_max_position_embeddings": 40, "factor": 4.0,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "longrope": {"rope_parameters": LONG, "original_max_position_embeddings": 40},
    "dynamic": {"max_position_embeddings": 40, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}},
}
TEXT = [(37 * i + 11) % 131 for i in range(70)]
COUNT = 8


def greedy(model: torch.nn.Module, prompt: list[int]) -> list[int]:
    """The whole sequence at every step; a copy, because transformers' dynamic rope remembers the longest sequence it saw."""
    fresh, ids = copy.deepcopy(model), list(prompt)
    for _ in range(COUNT):
        ids.append(int(logits(fresh, ids)[-1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("case", CASES)
def test_requests_of_all_lengths_answer_as_if_computed_anew(case: str, tmp_path: Path) -> None:
    model = make(tmp_path, "Phi3" if case == "longrope" else "Llama", **CASES[case])
    Tokenizer(models.WordLevel({f"w{i}": i for i in range(131)}, unk_token="w0")).save(str(tmp_path / "tokenizer.json"))
    prompts = [TEXT[:n] for n in (5, 36, 39, 40, 41, 70)]  # all begin alike; some cross the original length as they grow
    want = [greedy(model, prompt) for prompt in prompts]
    params = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True)
    with LLM(str(tmp_path), device="reference", dtype="float32", max_num_batched_tokens=24, kv_cache_memory_bytes=16 << 20) as llm:
        alone = [llm.generate({"prompt_token_ids": prompt}, params)[0] for prompt in prompts]
        together = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    assert [list(output.outputs[0].token_ids) for output in alone] == want
    assert [list(output.outputs[0].token_ids) for output in together] == want


def test_epochs() -> None:
    once, every = LengthEpochs(40, every=False), LengthEpochs(40, every=True)
    assert [once.of(n) for n in (1, 40, 41, 90)] == [0, 0, 1, 1]
    assert [every.of(n) for n in (1, 40, 41, 90)] == [0, 0, 41, 90]
