"""Writes docs/models.md and docs/models.json from the families and the last parity sweep; `--check` says whether they are stale."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from pagoda.serving.cli.models import SEES, Row, as_data, as_reasons, as_table, results, rows

ROOT = Path(__file__).resolve().parent.parent
HEAD = """# Models

Made by `python ci/model_matrix.py`; do not edit. `pagoda models` prints the same, `pagoda models --json` as data (`docs/models.json`).

**native**: a family here reads its configuration and weights, from safetensors and, where the format knows it, GGUF.
**parity**: tiny random checkpoints made by transformers, with its recorded answers, ran here in float32 (`pagoda parity`, all of them
with `python ci/parity_sweep.py DIR`): *green* where tokens and logits agree, *red* where any differs, *untested* where there is no
reference yet.
**tower by transformers**: the language model is native, what sees or hears before it is transformers' module.
**bridge**: no family, but transformers' own module runs here (where it is installed), with its attention on our pages or text by text;
`--model-impl`.
**tp**: numbers of ranks with which that was compared. Architectures that have a reference and that neither serves are *unsupported*; below
the table is why the bridge refuses them.
"""


COUNTED = """A model type is what a checkpoint's own config.json calls itself. It counts once in a task, and is green there where every
checkpoint of it agrees; so what transformers' list of causal classes names twice (Qwen 3.5 and its text model, GPT-SW3 and GPT-2)
counts once.
Beside that list are types published under names of their own that another class computes (`ci/more_references.py`); of the list are left
out those that make no text of tokens: MusicGen (two) and Gemma 4's drafters (two). Gemma 3n is compared with texts alone.
HRM is judged by twice what transformers' float32 is off by from its own float64 (`ci/bfloat16_margins.py --float32`): its layers run so
often that rounding grows beyond the usual limit in either.
"""


def documents() -> dict[str, str]:
    """The text of each file, by its name in docs/."""
    swept = results()
    table = rows(swept)
    native = [row for row in table if row.support == "native"]
    bridged = [row for row in table if row.support == "bridge"]
    towers = sum(row.note == SEES for row in native)
    count = (
        f"{len(native)} architectures are native, {_green(native)} of them green, {towers} under transformers' towers;"
        f" {len(bridged)} are bridged, {_green(bridged)} green"
    )
    why = as_reasons(table)
    below = f"\nWhy the bridge refuses the others, or is red:\n\n{why}" if why else ""
    where = f"the last sweep ran on {swept.get('made', '–')} (`{swept.get('device', '–')}`, torch {swept.get('torch', '–')})."
    types = f"{COUNTED}\n{counted(swept)}"
    return {"models.md": f"{HEAD}\n{count}; {where}\n\n{types}\n{as_table(table)}{below}", "models.json": as_data(table)}


TASKS = {
    "causal": "text in, text out of a decoder alone (of models that see: their text classes, and texts alone)",
    "vlm": "images or videos beside the text", "seq2seq": "a decoder after an encoder of text or sound", "embed": "vectors",
    "classify": "scores of a text", "reward": "scores of each token",
}  # fmt: skip


def counted(swept: dict[str, Any]) -> str:
    """Distinct model types by task, as a Markdown table."""
    met: dict[str, dict[str, list[bool]]] = {task: {} for task in TASKS}
    for checkpoint in swept["checkpoints"]:
        task = checkpoint["name"].split("/")[0] if "/" in checkpoint["name"] else "causal"
        passed = bool(checkpoint["runs"]) and all(run["passed"] for run in checkpoint["runs"])
        met[task].setdefault(checkpoint["model_type"], []).append(passed)
    lines = ["| task | what it is | checkpoints | model types | green |", "| --- | --- | --- | --- | --- |"]
    for task, types in met.items():
        green = sum(all(each) for each in types.values())
        lines.append(f"| {task} | {TASKS[task]} | {sum(map(len, types.values()))} | {len(types)} | {green} |")
    every = {kind for types in met.values() for kind in types}
    green = {kind for types in met.values() for kind, each in types.items() if all(each)}
    return "\n".join([*lines, f"| any | | {len(swept['checkpoints'])} | {len(every)} | {len(green)} |"]) + "\n"


def _green(table: list[Row]) -> int:
    return sum(row.parity == "green" for row in table)


def main(arguments: list[str], folder: Path = ROOT / "docs") -> int:
    made = documents()
    if "--check" not in arguments:
        for name, text in made.items():
            (folder / name).write_text(text, encoding="utf-8")
        return 0
    stale = [name for name, text in made.items() if not (folder / name).exists() or (folder / name).read_text(encoding="utf-8") != text]
    if stale:
        print(f"stale in docs/: {', '.join(stale)}; run python ci/model_matrix.py")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
