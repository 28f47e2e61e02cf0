"""Tiny random models that see, of transformers' own classes: their folders, processed inputs, and what transformers answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from tiny_checkpoints import SMALL
from tokenizers import Tokenizer, models, pre_tokenizers

IMAGE, VIDEO = 5, 6
TEXT = {**SMALL, "tie_word_embeddings": False}
CLIP = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32, "patch_size": 8}
QWEN = {"depth": 2, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3}
SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}

KINDS: dict[str, dict[str, Any]] = {
    "Llava": {"text_config": {"model_type": "llama", **TEXT}, "vision_config": {"model_type": "clip_vision_model", **CLIP}},
    "Qwen2VL": {
        "text_config": {"model_type": "qwen2_vl_text", **TEXT, "rope_parameters": SECTIONS},
        "vision_config": {**QWEN, "embed_dim": 32, "hidden_size": 32, "mlp_ratio": 2},
    },
    "Qwen3VL": {
        "text_config": {"model_type": "qwen3_vl_text", **TEXT, "head_dim": 8, "rope_parameters": SECTIONS},
        "vision_config": {**QWEN, "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 32, "deepstack_visual_indexes": [0, 1],
                          "num_position_embeddings": 64},
    },
    "Qwen3VLMoe": {
        "text_config": {"model_type": "qwen3_vl_moe_text", **TEXT, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2,
                        "moe_intermediate_size": 24, "rope_parameters": SECTIONS},
        "vision_config": {**QWEN, "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 32, "deepstack_visual_indexes": [0],
                          "num_position_embeddings": 64},
    },
    "Qwen3_5": {
        "text_config": {
            "model_type": "qwen3_5_text", **TEXT, "head_dim": 16, "num_hidden_layers": 4,
            "layer_types": [*["linear_attention"] * 3, "full_attention"], "linear_conv_kernel_dim": 4, "linear_key_head_dim": 8,
            "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
            "rope_parameters": {**SECTIONS, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5},
        },
        "vision_config": {**QWEN, "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 32, "num_position_embeddings": 64},
    },
    "Gemma3": {
        "text_config": {"model_type": "gemma3_text", **TEXT, "head_dim": 8, "num_hidden_layers": 2, "sliding_window": 8,
                        "layer_types": ["sliding_attention", "full_attention"]},
        "vision_config": {"model_type": "siglip_vision_model", **CLIP},
        "mm_tokens_per_image": 16,
    },
    "Lfm3Vl": {
        "text_config": {
            "model_type": "lfm3", **TEXT, "head_dim": 8, "num_hidden_layers": 3, "sliding_window": 8, "conv_L_cache": 3,
            "layer_types": ["conv", "full_attention", "sliding_attention"],
            "rope_parameters": {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in ("full_attention", "sliding_attention")},
        },
        "vision_config": {
            "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
            "layer_types": ["conv", "full_attention"], "conv_kernel_size": 3, "patch_size": 4, "spatial_merge_size": 2,
            "temporal_patch_size": 2, "in_channels": 3,
        },
        "projector_hidden_size": 32,
    },
}  # fmt: skip


def make_vision(folder: Path, name: str) -> torch.nn.Module:
    """Save a random `name`ForConditionalGeneration; float32 and eager."""
    model_class = getattr(transformers, f"{name}ForConditionalGeneration")
    torch.manual_seed(0)
    config = model_class.config_class(image_token_id=IMAGE, **({"video_token_id": VIDEO} if "Qwen" in name else {}), **KINDS[name])
    config.get_text_config().tie_word_embeddings = config.tie_word_embeddings = False
    config._attn_implementation = "eager"
    model = model_class(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            spread = 1.5 * parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.3
            parameter.add_(torch.randn_like(parameter) * spread)
    model.save_pretrained(folder)
    return model


def inputs(name: str, seed: int) -> tuple[list[int], dict[str, torch.Tensor]]:
    """A prompt's ids with 16 places of an image, and random pixels."""
    generator = torch.Generator().manual_seed(seed)
    ids = [7, 9, 11, *[IMAGE] * 16, 40, 41, 42]
    if name in ("Llava", "Gemma3"):
        return ids, _pixels(name, ids, torch.randn(1, 3, 32, 32, generator=generator))
    kinds = torch.tensor([[int(token == IMAGE) for token in ids]], dtype=torch.int32)
    pixels = torch.randn(64, 3 * 2 * 4 * 4, generator=generator)
    own = {} if name == "Lfm3Vl" else {"mm_token_type_ids": kinds}
    return ids, {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 8, 8]]), **own}


def _pixels(name: str, ids: list[int], pixels: torch.Tensor) -> dict[str, torch.Tensor]:
    kinds = torch.tensor([[int(token == IMAGE) for token in ids]])
    return {"pixel_values": pixels} | ({"token_type_ids": kinds} if name == "Gemma3" else {})


def two_images(name: str) -> tuple[list[int], dict[str, torch.Tensor]]:
    """A prompt with two images, the second of another form where the model takes several."""
    (ids, first), (_, second) = inputs(name, 1), inputs(name, 2)
    if name in ("Llava", "Gemma3"):
        return [*ids, *ids], _pixels(name, [*ids, *ids], torch.cat([first["pixel_values"], second["pixel_values"]]))
    ids = [*ids, 50, *[IMAGE] * 8, 60]
    kinds = torch.tensor([[int(token == IMAGE) for token in ids]], dtype=torch.int32)
    return ids, {
        "pixel_values": torch.cat([first["pixel_values"], second["pixel_values"][:32]]),
        "image_grid_thw": torch.tensor([[1, 8, 8], [1, 4, 8]]),
        **({} if name == "Lfm3Vl" else {"mm_token_type_ids": kinds}),
    }


def image_and_video() -> tuple[list[int], dict[str, torch.Tensor]]:
    """A prompt for Qwen 2-VL with an image, and after some text a video of four frames, which stand in two steps of time."""
    ids, tensors = inputs("Qwen2VL", 1)
    pixels = torch.randn(2 * 64, 3 * 2 * 4 * 4, generator=torch.Generator().manual_seed(9))
    ids = [*ids, 50, *[VIDEO] * 32, 60, 61]
    kinds = torch.tensor([[{IMAGE: 1, VIDEO: 2}.get(token, 0) for token in ids]], dtype=torch.int32)
    return ids, {**tensors, "pixel_values_videos": pixels, "video_grid_thw": torch.tensor([[2, 8, 8]]), "mm_token_type_ids": kinds}


@torch.no_grad()
def greedy(model: torch.nn.Module, ids: list[int], tensors: dict[str, torch.Tensor], count: int) -> list[int]:
    """So many tokens, each computed anew without a cache."""
    ids = list(ids)
    for _ in range(count):
        grown = {name: _grown(name, tensor, len(ids)) for name, tensor in tensors.items()}
        logits = model(input_ids=torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), use_cache=False, **grown).logits
        ids.append(int(logits[0, -1].argmax()))
    return ids[-count:]


def _grown(name: str, tensor: torch.Tensor, length: int) -> torch.Tensor:
    return torch.nn.functional.pad(tensor, (0, length - tensor.shape[1])) if name.endswith("token_type_ids") else tensor


def add_processor(folder: Path) -> None:
    """LLaVA's processor with a tokenizer of words t0 … t130."""
    words = {f"t{i}": i for i in range(131) if i != IMAGE} | {"<image>": IMAGE}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t3"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="t3", eos_token="t2", extra_special_tokens=["<image>"]
    )
    sizes = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
    fast.chat_template = (
        "{% for m in messages %}{% for p in m.content %}{{ '<image>' if p.type == 'image' else p.text }} {% endfor %}{% endfor %}"
    )
    pictures = transformers.CLIPImageProcessorPil(**sizes)
    options = {"patch_size": 8, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    transformers.LlavaProcessor(pictures, fast, image_token="<image>", chat_template=fast.chat_template, **options).save_pretrained(folder)
    fast.save_pretrained(folder)


def picture(seed: int) -> Image.Image:
    """Noise of 40 by 32 points."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (32, 40, 3), np.uint8))
