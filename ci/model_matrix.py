"""Writes docs/models.md and docs/models.json from the families and the last parity sweep; `--check` says whether they are stale."""

from __future__ import annotations

import sys
from pathlib import Path

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
    return {"models.md": f"{HEAD}\n{count}; {where}\n\n{as_table(table)}{below}", "models.json": as_data(table)}


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
