"""What transformers itself is off by in bfloat16, beside recorded float32 answers: `python ci/bfloat16_margins.py DIR…`.

Writes bfloat16.json into each folder: the largest error of its logits, in standard deviations of the reference, and the largest lead of a
greedy token that it gives up. `pagoda parity --dtype bfloat16` allows twice that. Each greedy row is computed from the recorded tokens
before it, so one early difference does not spoil the rest.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM


def margins(path: Path) -> dict[str, float]:
    """Of one folder with a generator."""
    reference = load_file(path / "reference.safetensors")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, attn_implementation="eager").eval()
    error = lead = 0.0
    for name in sorted(name.removesuffix(".prompt") for name in reference if name.endswith(".prompt")):
        prompt, tokens, want = (reference[f"{name}.{part}"] for part in ("prompt", "tokens", "logits"))
        with torch.no_grad():
            got = model(torch.cat([prompt, tokens])[None], use_cache=False).logits[0].float()
        rows = got[len(prompt) - 1 : len(prompt) - 1 + len(tokens)]
        spread = float(want.std())
        error = max(error, float((rows - want).abs().max()) / spread)
        chosen = rows.argmax(-1, keepdim=True)
        lead = max(lead, float((want.gather(1, tokens[:, None]) - want.gather(1, chosen)).max()) / spread)
        if f"{name}.full_logits" in reference:
            full = reference[f"{name}.full_logits"]
            error = max(error, float((got[: len(prompt)] - full).abs().max()) / float(full.std()))
    return {"error": error, "lead": lead}


def main(folders: list[str]) -> int:
    warnings.simplefilter("ignore")
    for folder in map(Path, folders):
        try:
            found = margins(folder)
        except Exception as trouble:
            print(f"{folder.name}: {type(trouble).__name__}: {str(trouble)[:150]}", flush=True)
            continue
        (folder / "bfloat16.json").write_text(json.dumps(found) + "\n")
        print(f"{folder.name}: {found['error']:.3f}, leads up to {found['lead']:.3f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
