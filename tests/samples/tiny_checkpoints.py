"""Tiny random checkpoints of transformers' own classes, and what transformers answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

SMALL = {
    "vocab_size": 131,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def make(folder: Path, name: str, **values: Any) -> torch.nn.Module:
    """Save a random model of class `name`ForCausalLM (or `name` itself) with small sizes; returns it, float32 and eager."""
    model_class = getattr(transformers, name if hasattr(transformers, name) else f"{name}ForCausalLM")
    torch.manual_seed(0)
    known = model_class.config_class().to_dict()
    config = model_class.config_class(**{**{key: value for key, value in SMALL.items() if key in known}, **values})
    config._attn_implementation = "eager"
    model = model_class(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            spread = 1.5 * parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.3
            parameter.add_(torch.randn_like(parameter) * spread)
    model.save_pretrained(folder)
    return model


@torch.no_grad()
def logits(model: torch.nn.Module, ids: list[int]) -> torch.Tensor:
    """Of every position, `[T, vocab]`, without a cache."""
    return model(torch.tensor([ids]), use_cache=False).logits[0].float()
