"""`pagoda models`: the architectures that this build knows, and which of them were held against recorded answers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files
from typing import Annotated, Any, Literal

import typer
from pagoda.models.registry import bridged_tasks, families, tasks_of

RESULTS = "docs/parity/results.json"
"""What `ci/parity_sweep.py` wrote, relative to the package."""

SEES = "the language model is native, what sees or hears before it is transformers' module"
_NOBODY = "no family serves it, and the bridge does not run it"

Parity = Literal["green", "red", "untested"]
Support = Literal["native", "bridge", "unsupported"]


@dataclass(frozen=True)
class Row:
    """One architecture.

    Attributes:
        support: "native" (of those that see their language model is);
            "bridge" where transformers' module runs on our pages; "unsupported" where a reference exists and neither serves.
        tp: numbers of ranks with which its answers were compared and agreed.
        parity: red where any comparison differed.
        note: of architectures that are red or unsupported, why; of native ones under transformers' towers `SEES`.
    """

    architecture: str
    model_type: str
    support: Support
    tasks: tuple[str, ...]
    tp: tuple[int, ...]
    parity: Parity
    note: str = ""


def models(as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False) -> None:
    """List the architectures that this build serves, and what parity says of them."""
    typer.echo((as_data if as_json else as_table)(rows(results())), nl=False)


def results() -> dict[str, Any]:
    """The committed results of the last sweep; none where the package came without them."""
    file = files("pagoda").joinpath(RESULTS)
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {"checkpoints": []}


def rows(swept: dict[str, Any]) -> list[Row]:
    """A row for each architecture that a family serves or that the sweep met, by name."""
    met: dict[str, list[dict[str, Any]]] = {}
    for checkpoint in swept["checkpoints"]:
        met.setdefault(checkpoint["architecture"], []).append(checkpoint)
    native = {name: family.model_types for family in families() for name in family.architectures}
    names = sorted(native.keys() | met.keys(), key=lambda name: (name.lower(), name))
    return [_row(name, native.get(name, ()), met.get(name, [])) for name in names]


def as_data(table: list[Row]) -> str:
    return json.dumps([vars(row) for row in table], indent=1) + "\n"


def as_table(table: list[Row]) -> str:
    """The rows as a Markdown table."""
    lines = ["| architecture | model type | support | tasks | tp | parity |", "| --- | --- | --- | --- | --- | --- |"]
    for row in table:
        ranks = ", ".join(map(str, row.tp)) or "–"
        support = f"{row.support}, tower by transformers" if row.note == SEES else row.support
        lines.append(f"| {row.architecture} | {row.model_type} | {support} | {', '.join(row.tasks) or '–'} | {ranks} | {row.parity} |")
    return "\n".join(lines) + "\n"


def as_reasons(table: list[Row]) -> str:
    """Why the bridge refuses an architecture or is red, as a Markdown list; empty where there is none."""
    return "".join(f"* {row.architecture}: {row.note}\n" for row in table if row.note not in ("", SEES))


def _row(name: str, model_types: tuple[str, ...], met: list[dict[str, Any]]) -> Row:
    types = sorted({checkpoint["model_type"] for checkpoint in met}) or list(model_types)
    tasks = tasks_of(name, types[0] if types else "")
    runs = [run for checkpoint in met for run in checkpoint["runs"]]
    if tasks is None and all("error" in run for run in runs):
        return Row(name, ", ".join(types), "unsupported", (), (), "untested", _error(runs) or _NOBODY)
    ranks = sorted({run["tp"] for run in runs})
    agreed = tuple(tp for tp in ranks if all(run["passed"] for run in runs if run["tp"] == tp))
    parity: Parity = "untested" if not runs else "green" if all(run["passed"] for run in runs) else "red"
    note = _why([run for run in runs if not run["passed"]]) if parity == "red" else ""
    if tasks is not None:
        return Row(name, ", ".join(types), "native", tasks, agreed, parity, note)
    seen = any("support" not in checkpoint for checkpoint in met)
    return Row(name, ", ".join(types), "native" if seen else "bridge", bridged_tasks(name), agreed, parity, note or (SEES if seen else ""))


def _why(red: list[dict[str, Any]]) -> str:
    return _error(red) or f"logits are {max((run.get('worst') or 0 for run in red), default=0)} standard deviations off, the limit is 0.001"


def _error(runs: list[dict[str, Any]]) -> str:
    """The first error that a run ended with, on one line; empty where none did."""
    return next((" ".join(run["error"].split()) for run in runs if run.get("error")), "")
