"""`pagoda parity`: runs checkpoints that carry recorded reference outputs and says, a line each, whether this build gives the same."""

from __future__ import annotations

import json
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from pagoda.hal.comm import Communicator, Topology
from pagoda.hal.device import Backend
from pagoda.hal.discovery import choose
from pagoda.hal.errors import ConfigError, PagodaError
from pagoda.models.comparison import Finding, Tolerance, compare_greedy, compare_values
from pagoda.models.direct import DirectRun
from pagoda.models.load import Checkpoint, describe, load_model, open_checkpoint
from pagoda.models.parallel.shard import Shard
from pagoda.ops.table import kernel_table
from safetensors.torch import load_file

REFERENCE = "reference.safetensors"
FULL = "p2"
"""The prompt whose reference holds the logits of every position."""

Outputs = dict[str, tuple[list[int], torch.Tensor]]


@dataclass(frozen=True)
class Report:
    """All comparisons of one checkpoint. `error`: why it did not run, if it did not."""

    path: str
    findings: tuple[Finding, ...] = ()
    error: str = ""

    @property
    def passed(self) -> bool:
        return bool(self.findings) and not self.error and all(finding.passed for finding in self.findings)

    def __str__(self) -> str:
        if self.error:
            return f"FAIL {self.path}  {self.error}"
        worst = max(finding.error for finding in self.findings)
        red = [f"{f.name}: {f.note or f'off by {f.error:.2g}'}" for f in self.findings if not f.passed]
        ties = sum("tie" in finding.note for finding in self.findings)
        parts = ["pass" if self.passed else "FAIL", self.path, f" worst {worst:.1e}", *([f" {ties} ties"] if ties else ())]
        return " ".join([*parts, *(["", "; ".join(red)] if red else ())])


def parity(
    checkpoints: Annotated[list[Path], typer.Argument(help="Folders with a checkpoint and reference.safetensors.", metavar="DIR…")],
    device: Annotated[str, typer.Option(help="Backend to run on.")] = "auto",
    tp: Annotated[int, typer.Option(help="Ranks that each layer is split over.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
    tolerance: Annotated[float, typer.Option(help="Largest error, in standard deviations of the reference.")] = 1e-3,
    tie: Annotated[float, typer.Option(help="Largest lead of a token, in standard deviations, that counts as a tie.")] = 0.02,
) -> None:
    """Compare this build with recorded reference outputs, in float32. Fails when a checkpoint differs."""
    backend = choose(device).backend
    reports = []
    for path in checkpoints:
        reports.append(check(path, backend, tp, Tolerance(tolerance, tie)))
        if not as_json:
            typer.echo(str(reports[-1]))
    if as_json:
        typer.echo(json.dumps([_record(report) for report in reports], indent=2))
    raise typer.Exit(0 if all(report.passed for report in reports) else 1)


def check(path: Path, backend: Backend, ranks: int = 1, tolerance: Tolerance | None = None) -> Report:
    """Run one checkpoint and compare; an error of ours becomes part of the report."""
    tolerance = tolerance or Tolerance()
    try:
        if not (path / REFERENCE).is_file():
            raise ConfigError(f"there is no {REFERENCE}; make one with the parity oracle")
        reference = load_file(path / REFERENCE)
        outputs = _run(open_checkpoint(path), backend, reference, ranks)
    except PagodaError as error:
        return Report(str(path), error=f"{type(error).__name__}: {error}")
    return Report(str(path), tuple(_compare(outputs, reference, tolerance)))


def _run(checkpoint: Checkpoint, backend: Backend, reference: dict[str, torch.Tensor], ranks: int) -> Outputs:
    """Outputs of rank 0; all ranks run in threads of this process."""
    address = f"127.0.0.1:{_free_port()}"
    with ThreadPoolExecutor(ranks) as pool:
        jobs = [pool.submit(_rank, checkpoint, backend, reference, Topology(rank, ranks, address, "tp")) for rank in range(ranks)]
        results = [job.result() for job in jobs]
    return results[0]


def _rank(checkpoint: Checkpoint, backend: Backend, reference: dict[str, torch.Tensor], topology: Topology) -> Outputs:
    device = backend.open(topology.rank if len(backend.devices()) > 1 else 0)
    table = kernel_table(backend, device.info)
    description = describe(checkpoint, dtype="float32", shard=Shard(topology.rank, topology.world), table=table)
    communicator: Communicator | None = device.communicator(topology) if topology.world > 1 else None
    model = load_model(description, device, table, communicator)
    prompts = {name.removesuffix(".prompt"): ids.tolist() for name, ids in sorted(reference.items()) if name.endswith(".prompt")}
    together = [name for name in prompts if name.startswith("b")]
    outputs: Outputs = {}
    for names in (*([name] for name in prompts if name not in together), together):
        asked = [prompts[name] for name in names]
        count = max(len(reference[f"{name}.tokens"]) for name in names)
        run = DirectRun(model, device, len(asked), max(map(len, asked)) + count)
        outputs.update(zip(names, run.generate(asked, count), strict=True))
    if f"{FULL}.full_logits" in reference:
        run = DirectRun(model, device, 1, len(prompts[FULL]))
        outputs[f"{FULL}.full"] = ([], run.logits(run.step([(0, prompts[FULL])]).hidden))
    return outputs


def _compare(outputs: Outputs, reference: dict[str, torch.Tensor], tolerance: Tolerance) -> list[Finding]:
    findings: list[Finding] = []
    for name, (tokens, logits) in outputs.items():
        if name.endswith(".full"):
            findings.append(compare_values(f"{name}_logits", logits, reference[f"{name}_logits"], tolerance))
        else:
            findings += compare_greedy(name, tokens, logits, reference[f"{name}.tokens"].tolist(), reference[f"{name}.logits"], tolerance)
    return findings


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _record(report: Report) -> dict[str, Any]:
    return {"path": report.path, "passed": report.passed, "error": report.error, "findings": [asdict(f) for f in report.findings]}
