"""A tiny Llama checkpoint folder: a configuration whose weights are drawn from a seed (`load_format="dummy"`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pagoda.serving.engine.config import EngineConfig

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 211,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "eos_token_id": 2,
}


def tiny_config(folder: Path, changes: dict[str, Any] | None = None, **settings: Any) -> EngineConfig:
    """Write the folder and configure an engine for it: a small pool, few sequences."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | (changes or {})))
    defaults = {"device": "cpu", "load_format": "dummy", "max_num_seqs": 8, "max_num_batched_tokens": 64, "num_gpu_blocks_override": 200}
    return EngineConfig(model=str(folder), **(defaults | settings))
