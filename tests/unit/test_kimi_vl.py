"""Kimi-VL in its published spelling, which transformers has no class for: what sees against a float64 reference, what reads against
transformers' DeepSeek V3 on the same embeddings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from pagoda.models.load import describe, load_model, open_checkpoint, support_of
from pagoda.models.media import EncoderInput
from pagoda.models.spec import MLA, DecoderSpec
from pagoda.serving.engine.params import SamplingParams
from pagoda.serving.sdk import LLM
from safetensors.torch import load_file, save_file
from spec_samples import opened
from tiny_checkpoints import make
from torch.nn import functional as F

DEVICE, TABLE = opened()
IMAGE, COUNT, WIDTH, HEADS, HIDDEN, PATCH, GRID, TEXT_WIDTH = 5, 10, 32, 2, 40, 4, 6, 32
LATENT = {"kv_lora_rank": 16, "q_lora_rank": None, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
EXPERTS = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1}
TEXT = {**LATENT, **EXPERTS, "num_key_value_heads": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "rope_theta": 800000.0}
VISION = {
    "model_type": "moonvit", "patch_size": PATCH, "init_pos_emb_height": GRID, "init_pos_emb_width": GRID, "num_attention_heads": HEADS,
    "num_hidden_layers": 2, "hidden_size": WIDTH, "intermediate_size": HIDDEN, "merge_kernel_size": [2, 2], "torch_dtype": "bfloat16",
}  # fmt: skip
GREEDY = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True)
Tensors = dict[str, torch.Tensor]


def vision_tensors() -> Tensors:
    """Of MoonViT and the projector, by their published names."""
    draw = torch.Generator().manual_seed(3)
    both = {"vision_tower.patch_embed.proj": (WIDTH, 3, PATCH, PATCH), "multi_modal_projector.linear_1": (4 * WIDTH, 4 * WIDTH)}
    both["multi_modal_projector.linear_2"] = (TEXT_WIDTH, 4 * WIDTH)
    norms = ["multi_modal_projector.pre_norm", "vision_tower.encoder.final_layernorm"]
    for at in (f"vision_tower.encoder.blocks.{i}" for i in range(2)):
        both |= {f"{at}.wqkv": (3 * WIDTH, WIDTH), f"{at}.wo": (WIDTH, WIDTH)}
        both |= {f"{at}.mlp.fc0": (HIDDEN, WIDTH), f"{at}.mlp.fc1": (WIDTH, HIDDEN)}
        norms += [f"{at}.norm0", f"{at}.norm1"]
    made = {"vision_tower.patch_embed.pos_emb.weight": torch.randn(GRID, GRID, WIDTH, generator=draw)}
    for name, shape in both.items():
        made[f"{name}.weight"] = torch.randn(shape, generator=draw) * 1.5 * torch.Size(shape[1:]).numel() ** -0.5
        made[f"{name}.bias"] = torch.randn(shape[0], generator=draw) * 0.3
    for name in norms:
        made[f"{name}.weight"] = 1 + torch.randn(WIDTH, generator=draw) * 0.3
        made[f"{name}.bias"] = torch.randn(WIDTH, generator=draw) * 0.3
    return made


def seen(tensors: Tensors, pixels: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Rows `[height · width / 4, text width]` of one image of so many patches, in float64.

    As published: learned positions of a square grid, resampled to the image's by bicubic interpolation; pairs of neighbouring numbers of
    each head turn, by the column and by the row in turn; pre-norm blocks; each square of four patches becomes one row."""
    t = {name: tensor.double() for name, tensor in tensors.items()}

    def affine(x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ t[f"{name}.weight"].flatten(1).t() + t[f"{name}.bias"]

    def normed(x: torch.Tensor, name: str) -> torch.Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * t[f"{name}.weight"] + t[f"{name}.bias"]

    at = "vision_tower.encoder"
    places = F.interpolate(t["vision_tower.patch_embed.pos_emb.weight"].permute(2, 0, 1)[None], size=(height, width), mode="bicubic")[0]
    x = affine(pixels.double().flatten(1), "vision_tower.patch_embed.proj") + places.permute(1, 2, 0).flatten(0, 1)
    dim = WIDTH // HEADS
    row, column = torch.meshgrid(torch.arange(height).double(), torch.arange(width).double(), indexing="ij")
    speeds = 10000.0 ** (-torch.arange(0, dim, 4).double() / dim)
    angles = torch.stack([column.flatten()[:, None] * speeds, row.flatten()[:, None] * speeds], dim=-1).flatten(1)
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]
    for block in (f"{at}.blocks.{i}" for i in range(2)):
        q, k, v = affine(normed(x, f"{block}.norm0"), f"{block}.wqkv").view(-1, 3, HEADS, dim).unbind(1)
        q, k = (torch.view_as_real(torch.view_as_complex(part.reshape(-1, HEADS, dim // 2, 2)) * turn).flatten(-2) for part in (q, k))
        weights = torch.einsum("qhd,khd->hqk", q, k).mul(dim**-0.5).softmax(-1)
        x = x + affine(torch.einsum("hqk,khd->qhd", weights, v).flatten(1), f"{block}.wo")
        x = x + affine(F.gelu(affine(normed(x, f"{block}.norm1"), f"{block}.mlp.fc0"), approximate="tanh"), f"{block}.mlp.fc1")
    x = normed(normed(x, f"{at}.final_layernorm"), "multi_modal_projector.pre_norm")
    squares = x.view(height // 2, 2, width // 2, 2, WIDTH).transpose(1, 2).reshape(-1, 4 * WIDTH)
    return affine(F.gelu(affine(squares, "multi_modal_projector.linear_1")), "multi_modal_projector.linear_2")


def make_kimi_vl(folder: Path) -> tuple[transformers.DeepseekV3ForCausalLM, Tensors]:
    """A folder as the hub holds it; its language model, and the tensors of what sees."""
    text = make(folder, "DeepseekV3", **TEXT)
    config, tensors = json.loads((folder / "config.json").read_text()), vision_tensors()
    own = {f"language_model.{name}": tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file({**own, **tensors}, folder / "model.safetensors", {"format": "pt"})
    published = {
        "architectures": ["KimiVLForConditionalGeneration"], "model_type": "kimi_vl", "auto_map": {"AutoConfig": "x.KimiVLConfig"},
        "ignore_index": -100, "media_placeholder_token_id": IMAGE, "pad_token_id": 0, "torch_dtype": "float32",
        "text_config": config, "vision_config": VISION,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(published))
    return text, tensors


def prompt(*grids: tuple[int, int]) -> tuple[list[int], torch.Tensor, torch.Tensor]:
    """Ids with images of so many patches between words, their patches, and their heights and widths."""
    places = [[IMAGE] * (height * width // 4) for height, width in grids]
    ids = [7, 9, *(token for i, place in enumerate(places) for token in [*place, 40 + i, 41])]
    draw = torch.Generator().manual_seed(sum(height for height, _ in grids))
    return ids, torch.randn(sum(h * w for h, w in grids), 3, PATCH, PATCH, generator=draw), torch.tensor(grids)


@torch.no_grad()
def wanted(text: torch.nn.Module, tensors: Tensors, ids: list[int], pixels: torch.Tensor, grids: torch.Tensor) -> list[int]:
    """Greedy, by transformers' DeepSeek V3 from embeddings on."""
    parts = pixels.split(grids.prod(-1).tolist())
    rows = torch.cat([seen(tensors, part, *grid) for part, grid in zip(parts, grids.tolist(), strict=True)]).float()
    ids = list(ids)
    for _ in range(COUNT):
        embeds = text.get_input_embeddings()(torch.tensor(ids))
        embeds[[i for i, token in enumerate(ids) if token == IMAGE]] = rows
        ids.append(int(text(inputs_embeds=embeds[None], use_cache=False).logits[0, -1].argmax()))
    return ids[-COUNT:]


def test_it_is_native_and_sees_as_published(tmp_path: Path) -> None:
    _, tensors = make_kimi_vl(tmp_path)
    description = describe(open_checkpoint(tmp_path), dtype="float32", table=TABLE)
    assert support_of(json.loads((tmp_path / "config.json").read_text())) == "native"
    assert description.sees is not None and isinstance(description.spec, DecoderSpec)
    assert all(isinstance(layer.mixer, MLA) for layer in description.spec.layers)
    encoder = load_model(description, DEVICE, TABLE).encoder
    assert encoder is not None
    for grid in ((8, 4), (6, 6), (2, 10)):
        ids, pixels, grids = prompt(grid)
        item = {"pixel_values": pixels, "image_grid_thw": F.pad(grids, (1, 0), value=1)}
        places = torch.tensor([token for token in ids if token == IMAGE])
        (got,) = encoder.forward([EncoderInput(places, item)])
        assert torch.allclose(got.double(), seen(tensors, pixels, *grid), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("grids", [((8, 4),), ((4, 6), (8, 8))])
def test_requests_are_answered_as_by_deepseek_v3_on_what_is_seen(grids: tuple[tuple[int, int], ...], tmp_path: Path) -> None:
    text, tensors = make_kimi_vl(tmp_path)
    ids, pixels, sizes = prompt(*grids)
    blank = wanted(text, tensors, ids, torch.zeros_like(pixels), sizes)
    want = wanted(text, tensors, ids, pixels, sizes)
    assert want != blank, "the image is to matter"
    settings = {"dtype": "float32", "max_model_len": 96, "kv_cache_memory_bytes": 8 << 20, "skip_tokenizer_init": True}
    with LLM(str(tmp_path), device="cpu", max_num_batched_tokens=16, **settings) as llm:
        media = {"processed": {"pixel_values": pixels, "image_grid_hws": sizes}}
        given = [{"prompt_token_ids": ids, "multi_modal_data": media}, {"prompt_token_ids": [7, 9, 11, 60]}]
        outputs = llm.generate(given, GREEDY, use_tqdm=False)
        assert llm.processor.media is not None and llm.processor.facts.modalities == ("image",)
    assert list(outputs[0].outputs[0].token_ids) == want
    alone = text.generate(torch.tensor([[7, 9, 11, 60]]), max_new_tokens=COUNT, do_sample=False, eos_token_id=None)
    assert list(outputs[1].outputs[0].token_ids) == alone[0, 4:].tolist()
