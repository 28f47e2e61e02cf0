"""`pagoda conformance`: holds a device to the contract and writes the report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from pagoda.serving.conformance.report import LEVELS, Report, Result
from pagoda.serving.conformance.runner import run_levels


def conformance(
    device: Annotated[str, typer.Option(help="Backend to hold to the contract.")] = "auto",
    level: Annotated[
        list[int] | None,
        typer.Option(help="0 device, 1 kernels, 2 graphs, 3 collectives, 4 models, 5 engine; repeatable; all when not given."),
    ] = None,
    check: Annotated[
        list[str] | None,
        typer.Option(help="Run only the check of this name, or those with this in their names, as gemm=native; repeatable."),
    ] = None,
    jobs: Annotated[
        int, typer.Option(help="Processes that share the checks of kernels and models; helps where a compiler works.", min=1)
    ] = 1,
    limit: Annotated[float | None, typer.Option(help="Seconds after which what has not ended is listed as not shown.", min=1)] = None,
    junit: Annotated[Path | None, typer.Option(help="Write the report as JUnit XML to this file.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write the report as JSON to this file.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write the report as Markdown to this file.")] = None,
) -> None:
    """Run the conformance suite on a device; exits 0 when every level that ran passed."""
    levels = tuple(sorted(set(level))) if level else tuple(range(len(LEVELS)))

    def keep(report: Report) -> None:
        """After each result, so that a run which is cut short leaves what it found."""
        for path, text in ((junit, report.to_junit), (json, report.to_json), (markdown, report.to_markdown)):
            if path is not None:
                path.write_text(text(), encoding="utf-8")

    report = run_levels(device, levels, say=_say, only=check or (), jobs=jobs, limit_s=limit, keep=keep)
    for one in report.levels:
        typer.echo(f"level {one} {LEVELS[one]}: {'passed' if report.passed(one) else 'did not pass'}")
    raise typer.Exit(0 if report.passed() else 1)


def _say(result: Result) -> None:
    detail = f"  {result.detail}" if result.detail else ""
    typer.echo(f"{result.outcome.value:9} {result.level} {result.name} ({result.seconds:.1f} s){detail}")
