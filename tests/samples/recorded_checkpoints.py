"""Tiny checkpoints in weights that bfloat16 has, with recorded answers and what transformers is off by in bfloat16."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_checkpoints import logits, make

ROOT = Path(__file__).resolve().parents[2]
TOKENIZER = {
    "version": "1.0", "added_tokens": [], "normalizer": None, "pre_tokenizer": None, "post_processor": None, "decoder": None,
    "model": {"type": "WordLevel", "vocab": {f"w{i}": i for i in range(131)}, "unk_token": "w0"},
}  # fmt: skip
Change = Callable[[str, torch.Tensor], torch.Tensor]


def record(
    folder: Path, name: str, prompts: Mapping[str, Sequence[int]], steps: int, change: Change = lambda _, tensor: tensor, **values: Any
) -> Path:
    """Make the checkpoint of class `name`ForCausalLM and answer `prompts` with `steps` greedy tokens each; returns `folder`.

    `change`: of each tensor as it was drawn, before it is rounded. The prompt p2 has the logits of every position recorded.
    """
    make(folder, name, **values)
    tensors = {key: change(key, tensor).bfloat16().float() for key, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    kind = f"{name}ForCausalLM"
    model = getattr(transformers, kind).from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    reference: dict[str, torch.Tensor] = {}
    for text, prompt in prompts.items():
        ids = list(prompt)
        for _ in range(steps):
            ids.append(int(logits(model, ids)[-1].argmax()))
        rows = logits(model, ids)
        found = {"prompt": torch.tensor(prompt), "tokens": torch.tensor(ids[len(prompt) :]), "logits": rows[len(prompt) - 1 : -1]}
        reference |= {f"{text}.{part}": tensor.clone() for part, tensor in found.items()}
        if text == "p2":
            reference["p2.full_logits"] = rows[: len(prompt)].clone()
    save_file(reference, folder / "reference.safetensors")
    (folder / "reference.json").write_text(json.dumps({"class": kind}))
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    subprocess.run([sys.executable, str(ROOT / "ci/bfloat16_margins.py"), str(folder)], check=True, capture_output=True)
    return folder


def with_tensors(source: Path, target: Path, change: Change) -> Path:
    """A copy of the checkpoint with other weights, beside the same recorded answers."""
    shutil.copytree(source, target)
    tensors = {name: change(name, tensor).contiguous() for name, tensor in load_file(source / "model.safetensors").items()}
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target
