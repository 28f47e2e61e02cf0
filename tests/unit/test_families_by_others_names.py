"""Families that transformers has no class for: a checkpoint of a class that computes the same, written down under their names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from pagoda.models.direct import DirectRun
from pagoda.models.load import describe, load_model, open_checkpoint
from pagoda.serving.conformance.comparison import Tolerance, compare_values
from safetensors.torch import load_file, save_file
from spec_samples import opened
from tiny_checkpoints import logits, make
from transformers.models.bloom.modeling_bloom import build_alibi_tensor

DEVICE, TABLE = opened()
IDS = [(37 * i + 11) % 131 for i in range(40)]


def ours(folder: Path) -> torch.Tensor:
    description = describe(open_checkpoint(folder), dtype="float32", table=TABLE)
    run = DirectRun(load_model(description, DEVICE, TABLE), DEVICE, 1, 64)
    return torch.cat([run.logits(run.step([(0, ids)]).hidden) for ids in (IDS[:29], IDS[29:])])


def rewrite(folder: Path, tensors: dict[str, torch.Tensor], drop: tuple[str, ...] = (), **values: Any) -> None:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    kept = {name: value for name, value in config.items() if name not in drop}
    (folder / "config.json").write_text(json.dumps({**kept, **values}))


def as_baichuan(folder: Path, drop: tuple[str, ...] = (), **values: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    for layer in {name.split(".")[2] for name in tensors if ".layers." in name}:
        at = f"model.layers.{layer}.self_attn"
        tensors[f"{at}.W_pack.weight"] = torch.cat([tensors.pop(f"{at}.{part}_proj.weight") for part in "qkv"])
    names = {"architectures": ["BaichuanForCausalLM"], "model_type": "baichuan"}
    rewrite(folder, tensors, ("num_key_value_heads", "head_dim", *drop), **names, **values)


def check(got: torch.Tensor, want: torch.Tensor) -> None:
    finding = compare_values("logits", got, want, Tolerance())
    assert finding.passed, finding


def test_baichuan_is_llama_with_its_projections_in_one(tmp_path: Path) -> None:
    want = logits(make(tmp_path, "Llama", num_key_value_heads=4), IDS)
    as_baichuan(tmp_path)
    check(ours(tmp_path), want)


def test_the_second_baichuan_divides_the_rows_of_its_head_by_their_length(tmp_path: Path) -> None:
    model = make(tmp_path, "Llama", num_key_value_heads=4, vocab_size=125696)
    as_baichuan(tmp_path, z_loss_weight=0)
    with torch.no_grad():
        model.lm_head.weight.div_(model.lm_head.weight.norm(dim=-1, keepdim=True))
    check(ours(tmp_path), logits(model, IDS))


@torch.no_grad()
def test_the_larger_baichuan_has_linear_biases_in_place_of_a_rotation(tmp_path: Path) -> None:
    model = make(tmp_path, "Llama", num_attention_heads=6, num_key_value_heads=6, hidden_size=48)
    as_baichuan(tmp_path, ("max_position_embeddings", "rope_parameters"), model_max_length=128)
    count = len(IDS)
    future = torch.full((count, count), float("-inf")).triu(1)
    mask = future + build_alibi_tensor(torch.ones(1, count), 6, torch.float32).view(1, 6, 1, count)
    still = torch.zeros(1, count, dtype=torch.long)  # turned by nothing
    check(ours(tmp_path), model(torch.tensor([IDS]), attention_mask=mask, position_ids=still, use_cache=False).logits[0])


def test_the_first_deepseek_adds_its_shared_experts_ungated(tmp_path: Path) -> None:
    """Qwen 2 MoE, whose gate of the shared expert is made to be one half always: so is that expert's output on disk."""
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 48}
    model = make(tmp_path, "Qwen2Moe", num_hidden_layers=3, mlp_only_layers=[0], qkv_bias=False, norm_topk_prob=False, **sizes)
    with torch.no_grad():
        for layer in model.model.layers[1:]:
            layer.mlp.shared_expert_gate.weight.zero_()
    stored = {name.replace("shared_expert.", "shared_experts."): t for name, t in load_file(tmp_path / "model.safetensors").items()}
    tensors = {name: t / 2 if "shared_experts.down" in name else t for name, t in stored.items() if "expert_gate" not in name}
    drop = ("num_experts", "shared_expert_intermediate_size", "mlp_only_layers", "decoder_sparse_step", "qkv_bias", "layer_types",
            "max_window_layers", "use_sliding_window", "router_aux_loss_coef", "output_router_logits", "sliding_window")  # fmt: skip
    rewrite(
        tmp_path,
        tensors,
        drop,
        architectures=["DeepseekForCausalLM"],
        model_type="deepseek",
        n_routed_experts=4,
        n_shared_experts=2,
        first_k_dense_replace=1,
        scoring_func="softmax",
        aux_loss_alpha=0.001,
        seq_aux=True,
        moe_layer_freq=1,
    )
    check(ours(tmp_path), logits(model, IDS))
