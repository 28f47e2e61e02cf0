"""Published models that are others under names of their own, in the spelling of those: Kimi-VL is Kimi K2.5 with images alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

KIMI_VL = "kimi_vl"
_VISION = {"init_pos_emb_height": "pos_emb_height", "init_pos_emb_width": "pos_emb_width"}
_PROJECTOR = {"multi_modal_projector.linear_1.": "mm_projector.proj.0.", "multi_modal_projector.linear_2.": "mm_projector.proj.2."}
_PROJECTOR |= {"multi_modal_projector.pre_norm.": "mm_projector.pre_norm."}


def respelled(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """A config.json as the model type has it that transformers knows; others as they are."""
    if config.get("model_type") != KIMI_VL:
        return config
    vision = {_VISION.get(name, name): value for name, value in config["vision_config"].items()} | {"model_type": "kimi_k25_vision"}
    text = dict(config["text_config"]) | {"model_type": "deepseek_v3"}
    return {
        **{name: value for name, value in config.items() if name not in ("media_placeholder_token_id", "auto_map", "ignore_index")},
        "model_type": "kimi_k25",
        "architectures": ["Kimi_K25ForConditionalGeneration"],
        "text_config": text,
        "vision_config": vision,
        "projection_hidden_size": vision["hidden_size"],
        "image_token_id": config["media_placeholder_token_id"],
        "video_token_id": -1,  # it was never shown any
        "tie_word_embeddings": bool(text.get("tie_word_embeddings", False)),
    }


def respelled_name(name: str) -> str:
    """Of a tensor in such a model."""
    start = next((old for old in _PROJECTOR if name.startswith(old)), "")
    return f"{_PROJECTOR[start]}{name.removeprefix(start)}" if start else name
