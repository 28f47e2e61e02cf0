"""Records a parity checkpoint's greedy answers again, each prompt with a new transformers model: `python ci/fresh_references.py DIR…`.

With rope scaling of type "dynamic" a transformers model remembers the longest sequence that it has seen, and rotates shorter ones by
it until one falls below the original context. Answers that one model gave in a row therefore depend on what ran before them. Those that
change are replaced in `reference.safetensors`; the recorded file stays beside it as `recorded.safetensors`.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

SAME = 1e-3
"""Standard deviations of the logits up to which two answers are the same."""


def again(folder: Path) -> dict[str, float]:
    """Record one checkpoint again; by prompt, how far the answers that changed were off, in standard deviations."""
    kept = folder / "recorded.safetensors"
    if not kept.exists():
        shutil.copy(folder / "reference.safetensors", kept)
    reference, changed = load_file(kept), {}
    for name in sorted(key.removesuffix(".prompt") for key in reference if key.endswith(".prompt")):
        fresh = _answer(folder, reference[f"{name}.prompt"].tolist(), len(reference[f"{name}.tokens"]))
        off = float((fresh["logits"] - reference[f"{name}.logits"]).abs().max() / reference[f"{name}.logits"].std())
        if off > SAME:
            changed[name] = off
            reference |= {f"{name}.{key}": value.to(reference[f"{name}.{key}"].dtype) for key, value in fresh.items()}
    save_file(reference, folder / "reference.safetensors")
    return changed


@torch.no_grad()
def _answer(folder: Path, prompt: list[int], count: int) -> dict[str, torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    ids, rows = list(prompt), []
    for _ in range(count):
        rows.append(model(torch.tensor([ids]), use_cache=False).logits[0, -1])
        ids.append(int(rows[-1].argmax()))
    logits = torch.stack(rows)
    best = logits.topk(2, dim=-1).values
    margins = (best[:, 0] - best[:, 1]) / logits.std(dim=-1)
    return {"tokens": torch.tensor(ids[len(prompt) :]), "logits": logits, "margins": margins}


if __name__ == "__main__":
    disable_progress_bar()
    for path in map(Path, sys.argv[1:]):
        found = again(path)
        print(
            f"{path.name}: " + (", ".join(f"{name} was off by {off:.2f}" for name, off in found.items()) or "nothing changed"), flush=True
        )
