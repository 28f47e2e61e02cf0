"""Shapes of models that the report runs with dummy weights, and an engine for each."""

from __future__ import annotations

import argparse
from typing import Any

from gpu_workloads import DummyEngine

_QWEN: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072,
    "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "hidden_act": "silu",
    "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000, "attention_bias": False, "tie_word_embeddings": True,
}  # fmt: skip
_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "hidden_act": "silu",
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "attention_bias": False, "tie_word_embeddings": False,
}  # fmt: skip
SHAPES = {
    "tiny": {**_QWEN, "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "head_dim": 16},
    "0.6b": _QWEN,
    "8b": _LLAMA,
}  # fmt: skip
LONGEST = {"tiny": 512, "0.6b": 8192, "8b": 8192}


def engine(options: argparse.Namespace, shape: str | None = None, **settings: Any) -> DummyEngine:
    """A small pool where nothing else is asked for: memory that is left over shows leaks."""
    shape = shape or options.shape
    chosen: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": LONGEST[shape], "max_num_seqs": 256, **settings}
    return DummyEngine(SHAPES[shape], device=options.device, use_tqdm_on_load=False, **chosen)
