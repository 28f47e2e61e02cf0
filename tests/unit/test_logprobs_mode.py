"""`logprobs_mode`: of the model's own logits, or of those that tokens are drawn by, beside transformers' logits worked over in numpy."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from pagoda import LLM, SamplingParams
from pagoda.hal.errors import RequestError
from pagoda.serving.engine.params import LogprobsMode
from tiny_checkpoints import logits, make

PROMPT = [30, 40, 50]
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "warm": {"temperature": 0.5},
    "top k": {"temperature": 0.7, "top_k": 5},
    "top p": {"temperature": 2.0, "top_p": 0.6},
    "min p": {"temperature": 1.0, "min_p": 0.05},
    "bias": {"temperature": 0.0, "logit_bias": {7: 50.0}},
    "penalty": {"temperature": 0.0, "presence_penalty": 1.5},
    "allowed": {"temperature": 0.0, "allowed_token_ids": (3, 4, 9, 30)},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("tiny")
    return folder, make(folder, "Llama", vocab_size=64, bos_token_id=0, eos_token_id=1, pad_token_id=2)


def processed(row: np.ndarray, said: list[int], temperature: float, **more: Any) -> np.ndarray:
    """The logits of one place after everything that a request may ask for."""
    row = row.copy()
    for token, bias in more.get("logit_bias", {}).items():
        row[token] += bias
    for token in set(said):
        row[token] -= more.get("presence_penalty", 0.0)
    if allowed := more.get("allowed_token_ids"):
        row[[token for token in range(len(row)) if token not in allowed]] = -np.inf
    if temperature == 0:
        return row
    row = row / temperature
    probs = np.exp(row - row.max()) / np.exp(row - row.max()).sum()
    order = np.argsort(-row, kind="stable")
    kept = probs[order] >= more.get("min_p", 0.0) * probs.max()
    kept &= np.arange(len(row)) < (more.get("top_k") or len(row))
    left = np.where(kept, probs[order], 0.0)
    before = np.cumsum(left / left.sum()) - left / left.sum()
    kept &= before < more.get("top_p", 1.0)
    row[order[~kept]] = -np.inf
    return row


@pytest.mark.parametrize("mode", get_args(LogprobsMode))
def test_logprobs_are_of_the_logits_that_the_mode_says(model: tuple[Path, Any], mode: LogprobsMode) -> None:
    folder, reference = model
    with LLM(str(folder), device="cpu", dtype="float32", skip_tokenizer_init=True, logprobs_mode=mode) as llm:
        params = [
            SamplingParams(logprobs=4, max_tokens=5, seed=3, ignore_eos=True, detokenize=False, **given) for given in SETTINGS.values()
        ]
        outputs = llm.generate([PROMPT] * len(params), params)
    for given, output in zip(SETTINGS.values(), outputs, strict=True):
        tokens = list(output.outputs[0].token_ids)
        rows = logits(reference, PROMPT + tokens).double().numpy()[len(PROMPT) - 1 :]
        for place, (token, told) in enumerate(zip(tokens, output.outputs[0].logprobs, strict=True)):
            row = rows[place] if mode.startswith("raw") else processed(rows[place], tokens[:place], **given)
            wanted = row if mode.endswith("logits") else row - row.max() - np.log(np.exp(row - row.max()).sum())
            assert told[token].logprob == pytest.approx(wanted[token], abs=2e-4), (given, place)
            finite = {one: entry.logprob for one, entry in told.items() if np.isfinite(entry.logprob)}
            assert finite == pytest.approx({one: wanted[one] for one in finite}, abs=2e-4), (given, place)


def test_where_logits_stand_for_logprobs_nothing_is_ranked_by_them(model: tuple[Path, Any]) -> None:
    folder, reference = model
    with LLM(str(folder), device="cpu", dtype="float32", skip_tokenizer_init=True, logprobs_mode="processed_logits") as llm:
        with pytest.raises(RequestError, match="beam search adds up logprobs"):
            llm.beam_search([PROMPT], beam_width=2, max_tokens=3)
        params = SamplingParams(max_tokens=1, logprobs=1, prompt_logprobs=1, temperature=0, detokenize=False)
        output = llm.generate([PROMPT], params)[0]
    rows = logits(reference, PROMPT).double().numpy()
    of_prompt = rows[0] - rows[0].max() - np.log(np.exp(rows[0] - rows[0].max()).sum())
    assert output.prompt_logprobs[1][PROMPT[1]].logprob == pytest.approx(of_prompt[PROMPT[1]], abs=2e-4)
    assert max(entry.logprob for entry in output.outputs[0].logprobs[0].values()) == pytest.approx(rows[-1].max(), abs=2e-4)
