"""`pagoda plan` for eight H200, MI355X and TPU v6e, none of them here, against bytes reckoned by hand from the models' published sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pagoda.serving.cli.main import main

GIB = 1 << 30
DEVICES = {"null:h200": 150_754_820_096, "null:mi355x": 288 * GIB, "null:v6e": 32 * GIB}
"""Bytes of each: what NVIDIA's driver shows of 141 GB, and the figures of AMD's and Google's data sheets."""

SHARE = 0.9
"""Of a device's memory that an engine takes, unless told otherwise."""

COMMON = {"hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 5e5, "tie_word_embeddings": False, "torch_dtype": "bfloat16"}
LLAMA_70B: dict[str, Any] = COMMON | {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "max_position_embeddings": 131072,
}  # fmt: skip
MIXTRAL: dict[str, Any] = COMMON | {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 32000,
    "max_position_embeddings": 32768, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None,
}  # fmt: skip

WHOLE = {"llama": 70_553_706_496, "mixtral": 46_702_792_704}
"""Numbers in the whole checkpoints, as their publishers count them."""


def numbers_of_llama(ranks: int) -> int:
    """Numbers on one of `ranks`. Norms are whole on each; heads, feed-forward and vocabulary are parted."""
    attention = 2 * 8192 * 8192 + 2 * 8192 * 1024
    layer = (attention + 3 * 8192 * 28672) // ranks + 2 * 8192
    return 80 * layer + 2 * 128256 * 8192 // ranks + 8192


def numbers_of_mixtral(ranks: int) -> int:
    """As for Llama, with a router of eight rows that each rank has whole, and eight experts a layer."""
    attention = 2 * 4096 * 4096 + 2 * 4096 * 1024
    layer = (attention + 8 * 3 * 4096 * 14336) // ranks + 8 * 4096 + 2 * 4096
    return 32 * layer + 2 * 32000 * 4096 // ranks + 4096


MODELS = {"llama": (LLAMA_70B, numbers_of_llama, 80), "mixtral": (MIXTRAL, numbers_of_mixtral, 32)}
"""Configuration, numbers on a rank, layers."""


@pytest.mark.parametrize("name", MODELS)
def test_the_hand_counts_as_the_publishers_do(name: str) -> None:
    assert MODELS[name][1](1) == WHOLE[name]


@pytest.mark.parametrize(
    ("device", "model", "ranks"),
    [*((device, model, 8) for device in DEVICES for model in MODELS), ("null:mi355x", "llama", 1), ("null:mi355x", "mixtral", 2)],
)
def test_every_byte_of_a_plan(device: str, model: str, ranks: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, numbers, layers = MODELS[model]
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ["plan", str(tmp_path), "--device", device, "--tensor-parallel-size", str(ranks), "--max-model-len", "8192"]
    assert main([*words, "--load-format", "dummy", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    memory = plan["memory"]
    assert memory["total"] == DEVICES[device]
    assert memory["reserved"] == DEVICES[device] - int(DEVICES[device] * SHARE)
    assert memory["weights"] == 2 * numbers(ranks) == sum(plan["weights"].values())
    tokens = plan["groups"][0]["tokens_per_page"]
    page = 2 * tokens * (8 // ranks) * 128 * 2 * layers  # K and V, bfloat16
    left = int(DEVICES[device] * SHARE) - memory["weights"] - memory["work"]
    assert memory["page_bytes"] == page
    assert memory["num_pages"] == left // page and memory["kv"] == left // page * page
    assert memory["work"] == sum(plan["work"].values())
    assert memory["total"] == sum(memory[part] for part in ("reserved", "weights", "work", "kv", "free"))
    assert plan["num_pages"] == left // page - 1 and plan["tokens"] <= (left // page - 1) * tokens


def test_what_does_not_fit_is_refused_with_the_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_70B))
    words = ["plan", str(tmp_path), "--device", "null:v6e", "--tensor-parallel-size", "4", "--load-format", "dummy"]
    assert main(words) != 0
    assert f"{2 * numbers_of_llama(4):,}" in capsys.readouterr().err
