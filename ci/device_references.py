"""Checkpoints for a run of parity on a device that is far away: `python ci/device_references.py DIR`, with the oracle's package importable.

One of each kind of block that ci/block_kinds.py lists and one vision-language model of each of six towers, as DIR/TASK_NAME, with
what transformers is off by in bfloat16 (`ci/bfloat16_margins.py`). Weights are numbers that bfloat16 has, as those of most published
checkpoints: so rounding them is no part of the error, and they pack to half the size.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections import defaultdict
from importlib import import_module
from pathlib import Path
from typing import Any

import bfloat16_margins
import torch
from block_kinds import MORE, SECTIONS
from more_references import more
from safetensors.torch import load_file, save_file

VISION = ("gemma3", "idefics3", "internvl", "llava", "mistral3", "qwen2_5_vl")
KEPT_BITS = -(1 << 7)
"""Of a recorded number: 16 of the mantissa, which is a hundredth of what float32 is allowed to be off."""
UNUSED = (".margins", ".cls", ".cls.normalized", ".last", ".last.normalized", ".pooler", ".pooler.normalized")


def rounded(weights: Any) -> None:
    """Has the oracle round what it draws."""
    draw = weights.randomize

    @torch.no_grad()
    def randomize(model: torch.nn.Module, *rest: Any) -> None:
        draw(model, *rest)
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16().float())

    weights.randomize = randomize


def make(folder: Path) -> None:
    """All of them, in the oracle's own folders."""
    make_all = import_module("parity.make").main
    asked: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name in dict.fromkeys(kind.checkpoint for kinds in SECTIONS.values() for kind in kinds if kind.checkpoint not in MORE):
        task, kind = name.split("/")
        base, _, other = kind.partition("@")
        asked[task, other].append(base)
    asked["vlm", ""] = list(VISION)
    for (task, other), kinds in asked.items():
        sys.argv[1:] = [",".join(kinds), str(folder), "--task", task, *(("--variant", other) if other else ())]
        make_all()
    more(folder)


def trimmed(folder: Path) -> None:
    """Leaves out what parity does not read, and the last bits of what it does."""
    path = folder / "reference.safetensors"
    kept = {name: tensor for name, tensor in load_file(path).items() if not name.endswith(UNUSED)}
    for name, tensor in kept.items():
        if tensor.dtype == torch.float32 and not name.startswith("inputs."):
            kept[name] = (tensor.contiguous().view(torch.int32) & KEPT_BITS).view(torch.float32)
    save_file(kept, path)


def main(target: Path) -> int:
    import_module("parity.environment")
    rounded(import_module("parity.weights"))
    with tempfile.TemporaryDirectory() as made:
        make(Path(made))
        folders = [Path(shutil.copytree(one, target / f"{one.parent.name}_{one.name}")) for one in sorted(Path(made).glob("*/*"))]
    status = bfloat16_margins.main(list(map(str, folders)))
    for folder in folders:
        trimmed(folder)
    return status


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).absolute()))
