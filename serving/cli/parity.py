"""`pagoda parity`: whether this build answers like the recorded reference outputs of checkpoints, a line each."""

from __future__ import annotations

import json
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from pagoda.hal.discovery import choose
from pagoda.serving.cli.parity_run import Report, check
from pagoda.serving.conformance.comparison import TOLERANCES, Tolerance


class Precision(StrEnum):
    """What a checkpoint may be run in."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


def parity(
    checkpoints: Annotated[list[Path], typer.Argument(help="Folders with a checkpoint and reference.safetensors.", metavar="DIR…")],
    device: Annotated[str, typer.Option(help="Backend to run on.")] = "auto",
    tp: Annotated[int, typer.Option(help="Ranks that each layer is split over.", min=1)] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
    dtype: Annotated[Precision, typer.Option(help="Of weights and sums; the reference is float32.")] = Precision.FLOAT32,
    tolerance: Annotated[
        float | None, typer.Option(help="Largest error, in standard deviations of the reference. Default: 1e-3, for bfloat16 0.1.")
    ] = None,
    tie: Annotated[
        float | None, typer.Option(help="Largest lead of a token, in standard deviations, that is a tie. Default: 0.02, for bfloat16 0.15.")
    ] = None,
) -> None:
    """Compare this build with recorded reference outputs. Fails when a checkpoint differs."""
    backend = choose(device).backend
    usual = TOLERANCES[dtype.value]
    asked = Tolerance(usual.error if tolerance is None else tolerance, usual.tie if tie is None else tie)
    allowed = None if tolerance is None and tie is None else asked
    reports = []
    for path in checkpoints:
        reports.append(check(path, backend, tp, allowed, dtype.value))
        if not as_json:
            typer.echo(str(reports[-1]))
    if as_json:
        typer.echo(json.dumps([_record(report) for report in reports], indent=2))
    raise typer.Exit(0 if all(report.passed for report in reports) else 1)


def _record(report: Report) -> dict[str, Any]:
    return {"path": report.path, "passed": report.passed, "error": report.error, "findings": [asdict(f) for f in report.findings]}
