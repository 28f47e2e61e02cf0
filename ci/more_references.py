"""Makes what the parity oracle does not by itself: `python ci/more_references.py DIR`, with the oracle's package importable.

* DIR/embed/colbert, of DIR/embed/bert: transformers has no class of it, and it is BERT and a product, so that the recorded states of every
  token, projected, are its answers.
* DIR/causal/glm_moe_dsa@shared: GLM 5 with layers that see what another one chose.
* DIR/embed/electra@narrow: ELECTRA whose embeddings are half as wide as its layers.
* DIR/causal/{baichuan,internlm3,iquestcoder,kimi_k2,stablelm_epoch}: published under names of their own, and computed as Llama (with a KV
  head for each head in Baichuan), DeepSeek V3 and StableLM; DIR/vlm/kimi_vl likewise as Kimi K2.5 with one image.
"""

from __future__ import annotations

import json
import shutil
import sys
from importlib import import_module
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

WIDTH = 24


SHARED = {"indexer_types": ["full", "shared", "full", "shared"]}


def colbert(folder: Path) -> None:
    source, target = folder / "embed/bert", folder / "embed/colbert"
    shutil.copytree(source, target, dirs_exist_ok=True)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    weight = torch.randn(WIDTH, config["hidden_size"], generator=torch.Generator().manual_seed(0)) * config["hidden_size"] ** -0.5
    (target / "config.json").write_text(json.dumps(config | {"architectures": ["HF_ColBERT"], "dim": WIDTH}, indent=1), encoding="utf-8")
    tensors = {f"bert.{name.removeprefix('bert.')}": tensor for name, tensor in load_file(source / "model.safetensors").items()}
    save_file({**tensors, "linear.weight": weight}, target / "model.safetensors", metadata={"format": "pt"})
    recorded, answers = load_file(source / "reference.safetensors"), dict[str, torch.Tensor]()
    for name in (key.removesuffix(".prompt") for key in recorded if key.endswith(".prompt")):
        vectors = (recorded[f"{name}.hidden"].double() @ weight.double().t()).float()
        mean = vectors.double().mean(0)
        answers |= {f"{name}.prompt": recorded[f"{name}.prompt"], f"{name}.hidden": vectors, f"{name}.mean": mean.float()}
        answers[f"{name}.mean.normalized"] = torch.nn.functional.normalize(mean, dim=-1).float()
    save_file(answers, target / "reference.safetensors")


def published(folder: Path, kind: str, name: str, architecture: str, **values: object) -> None:
    """DIR/causal/`kind` under the name of another model that computes the same; its answers are the recorded ones."""
    source, target = folder / "causal" / kind, folder / "causal" / name
    shutil.copytree(source, target, dirs_exist_ok=True)
    config = json.loads((source / "config.json").read_text(encoding="utf-8")) | {"architectures": [architecture], "model_type": name}
    kept = {key: value for key, value in {**config, **values}.items() if value is not None}
    (target / "config.json").write_text(json.dumps(kept, indent=1), encoding="utf-8")


def baichuan(folder: Path) -> None:
    published(folder, "llama@mha", "baichuan", "BaichuanForCausalLM", num_key_value_heads=None, head_dim=None)
    path = folder / "causal/baichuan/model.safetensors"
    tensors = load_file(path)
    for at in sorted({name.partition(".self_attn.")[0] for name in tensors if ".self_attn." in name}):
        parts = [tensors.pop(f"{at}.self_attn.{part}_proj.weight") for part in "qkv"]
        tensors[f"{at}.self_attn.W_pack.weight"] = torch.cat(parts)
    save_file(tensors, path, metadata={"format": "pt"})


def kimi_vl(folder: Path) -> None:
    source, target = folder / "vlm/kimi_k25", folder / "vlm/kimi_vl"
    shutil.copytree(source, target, dirs_exist_ok=True)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    vision = {name.replace("pos_emb_", "init_pos_emb_"): value for name, value in config["vision_config"].items() if name in MOONVIT}
    published = {
        "architectures": ["KimiVLForConditionalGeneration"], "model_type": "kimi_vl", "ignore_index": -100,
        "media_placeholder_token_id": config["image_token_id"], "vision_config": {**vision, "model_type": "moonvit"},
        "text_config": {**config["text_config"], "tie_word_embeddings": config["tie_word_embeddings"]},
    }  # fmt: skip
    (target / "config.json").write_text(json.dumps(published, indent=1), encoding="utf-8")
    own = {"mm_projector.proj.0.": "multi_modal_projector.linear_1.", "mm_projector.proj.2.": "multi_modal_projector.linear_2."}
    # What transformers makes of these names when it saves is not what it reads.
    own |= {
        "model.mm_projector.pre_norm.": "multi_modal_projector.pre_norm.",
        "language_model.model.blocks.": "language_model.model.layers.",
    }
    own["vision_tower.encoder.patch_embed."] = "vision_tower.patch_embed."
    tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        start = next((theirs for theirs in own if name.startswith(theirs)), "")
        tensors[own.get(start, "") + name.removeprefix(start)] = tensor
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})


MOONVIT = (
    "patch_size", "pos_emb_height", "pos_emb_width", "num_attention_heads", "num_hidden_layers", "hidden_size", "intermediate_size",
    "merge_kernel_size",
)  # fmt: skip


def variant(folder: Path, kind: str, name: str, changes: dict[str, object], *more: str) -> None:
    overrides, make = import_module("parity.overrides"), import_module("parity.make")
    overrides.VARIANTS[kind] = {name: changes}
    sys.argv[1:] = [kind, str(folder), "--variant", name, *more]
    make.main()


def more(folder: Path) -> None:
    colbert(folder)
    variant(folder, "glm_moe_dsa", "shared", SHARED)
    variant(folder, "electra", "narrow", {"embedding_size": 32}, "--task", "embed")


def renamed(folder: Path) -> None:
    """Those that other models compute; DIR/causal and DIR/vlm have to hold these."""
    variant(folder, "llama", "mha", {"num_key_value_heads": 4})
    baichuan(folder)
    published(folder, "llama", "internlm3", "InternLM3ForCausalLM", qkv_bias=False)
    published(folder, "llama", "iquestcoder", "IQuestCoderForCausalLM")
    published(folder, "deepseek_v3", "kimi_k2", "DeepseekV3ForCausalLM")
    published(folder, "stablelm", "stablelm_epoch", "StableLMEpochForCausalLM")
    kimi_vl(folder)


if __name__ == "__main__":
    more(Path(sys.argv[1]).absolute())
    renamed(Path(sys.argv[1]).absolute())
