"""Runs one checkpoint with recorded reference outputs: through the engine as users do, and through the model alone for its full logits."""

from __future__ import annotations

import json
import math
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pagoda.hal.comm import Communicator, Topology
from pagoda.hal.device import Backend, Device
from pagoda.hal.discovery import find
from pagoda.hal.errors import ConfigError, PagodaError
from pagoda.hal.info import Feature
from pagoda.models.direct import DirectRun
from pagoda.models.load import Checkpoint, describe, load_model, open_checkpoint
from pagoda.models.model import Model
from pagoda.models.parallel.shard import Shard
from pagoda.ops.table import kernel_table
from pagoda.serving.cli.parity_answers import engine_findings, greedy_params, logprobs_finding
from pagoda.serving.cli.parity_crossed import NAME, is_crossed, run_crossed
from pagoda.serving.cli.parity_media import check_media, is_media
from pagoda.serving.cli.parity_pooled import check_pooled, is_pooled
from pagoda.serving.conformance.comparison import (
    TOLERANCES,
    Finding,
    Terms,
    Tolerance,
    compare_beside,
    compare_greedy,
    compare_paired,
    compare_typical,
    compare_values,
    rows_off,
)
from pagoda.serving.frontend.outputs import RequestOutput
from pagoda.serving.sdk import LLM
from safetensors.torch import load_file

REFERENCE = "reference.safetensors"
FULL = "p2"
"""The prompt whose reference holds the logits of every position."""
POOL_BYTES = 64 << 20
COMPILED: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "kv_cache_memory_bytes": 4 << 20}
"""Of the engine where every size of step is a program that is compiled at start: what the recorded prompts need."""

Reference = dict[str, torch.Tensor]
Answer = tuple[list[int], torch.Tensor]
"""Greedy tokens and the logits they came from, `[tokens, vocab]`."""


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


def check(path: Path, backend: Backend, ranks: int = 1, tolerance: Tolerance | None = None, dtype: str = "float32") -> Report:
    """Run one checkpoint and compare; an error of ours becomes part of the report. `tolerance`: the dtype's, where None."""
    terms = Terms(ranks, dtype, tolerance or _usual(path, dtype))
    try:
        if not (path / REFERENCE).is_file():
            raise ConfigError(f"there is no {REFERENCE} beside the checkpoint; give a folder that the parity oracle made")
        reference = load_file(path / REFERENCE)
        findings = _compared(path, backend, reference, terms)
    except PagodaError as error:
        return Report(str(path), error=f"{type(error).__name__}: {error}")
    typical = [compare_typical(findings, terms.tolerance)] if terms.tolerance.typical < math.inf else []
    return Report(str(path), (*findings, *typical))


def _compared(path: Path, backend: Backend, reference: Reference, terms: Terms) -> list[Finding]:
    """By the kind of answers that were recorded."""
    if is_pooled(reference):
        return check_pooled(path, backend.name, reference, turns(reference), terms)
    if is_media(reference, open_checkpoint(path).config):
        return check_media(path, backend.name, reference, terms)
    if is_crossed(reference):
        outputs = run_crossed(path, backend.name, reference, terms, greedy_params(reference, NAME))
        return [found for output in outputs for found in _findings(NAME, output, reference, terms.tolerance)]
    beside = _beside(path, terms.dtype)
    return [*_check_model(open_checkpoint(path), backend, reference, terms, beside), *_check_engine(path, backend.name, reference, terms)]


def _usual(path: Path, dtype: str) -> Tolerance:
    """The dtype's, or by what the oracle itself is off in it where that was measured and is more (`ci/bfloat16_margins.py`).

    Twice its errors and the leads that it gives up; a lead no larger than its errors may turn as well.
    """
    usual, measured = TOLERANCES[dtype], path / f"{dtype}.json"
    if not measured.is_file():
        return usual
    margins = json.loads(measured.read_text(encoding="utf-8"))
    error, typical = (max(usual.error, 2 * margins[name]) for name in ("error", "typical"))
    return Tolerance(error, max(usual.tie, 2 * margins["lead"], margins["error"]), typical)


def _beside(path: Path, dtype: str) -> torch.Tensor | None:
    """What each row of the recorded texts is off by in the oracle itself, `[runs, rows]` prompt by prompt, where that was measured.

    The first run is the oracle as it is, others round products to either neighbour.
    """
    measured = path / f"{dtype}.json"
    margins = json.loads(measured.read_text(encoding="utf-8")) if measured.is_file() else {}
    return torch.tensor([margins["rows"], *margins.get("draws", ())], dtype=torch.float64) if "rows" in margins else None


def turns(reference: Reference) -> list[list[str]]:
    """Names of the prompts, grouped as they are to be sent: alone, and those that begin with b together."""
    names = sorted(name.removesuffix(".prompt") for name in reference if name.endswith(".prompt"))
    together = [name for name in names if name.startswith("b")]
    return [*([name] for name in names if name not in together), *([together] if together else [])]


def _check_model(
    checkpoint: Checkpoint, backend: Backend, reference: Reference, terms: Terms, beside: torch.Tensor | None = None
) -> list[Finding]:
    """The model alone; all ranks run in threads of this process, rank 0 is compared."""
    address = f"127.0.0.1:{_free_port()}"
    groups = [Topology(rank, terms.ranks, address, "tp") for rank in range(terms.ranks)]
    with ThreadPoolExecutor(terms.ranks) as pool:
        jobs = [pool.submit(_rank, checkpoint, backend, reference, topology, terms.dtype, beside is not None) for topology in groups]
        results = [job.result() for job in jobs]
    answers, full, rows = results[0]
    findings = [finding for name, answer in answers.items() for finding in _greedy(name, answer, reference, terms.tolerance)]
    if full is not None:
        findings.append(compare_values(f"{FULL}.full_logits", full, reference[f"{FULL}.full_logits"], terms.tolerance))
    if beside is None or rows is None:
        return findings
    return [*findings, compare_beside(rows, beside, terms.tolerance), compare_paired(rows, beside[0])]


def _rank(
    checkpoint: Checkpoint, backend: Backend, reference: Reference, topology: Topology, dtype: str, whole: bool
) -> tuple[dict[str, Answer], torch.Tensor | None, torch.Tensor | None]:
    """Greedy answers, logits of a prompt's every position, and, of the `whole` recorded texts, what each row is off by."""
    device = backend.open(topology.rank if len(backend.devices()) > 1 else 0)
    table = kernel_table(backend, device.info)
    description = describe(checkpoint, dtype=dtype, shard=Shard(topology.rank, topology.world), table=table)
    communicator: Communicator | None = device.communicator(topology) if topology.world > 1 else None
    model = load_model(description, device, table, communicator)
    answers: dict[str, Answer] = {}
    for names in turns(reference):
        asked, count = [_prompt(reference, name) for name in names], max(len(reference[f"{name}.tokens"]) for name in names)
        run = DirectRun(model, device, len(asked), max(map(len, asked)) + count)
        answers.update(zip(names, run.generate(asked, count), strict=True))
    full = None
    if f"{FULL}.full_logits" in reference:
        prompt = _prompt(reference, FULL)
        run = DirectRun(model, device, 1, len(prompt))
        full = run.logits(run.step([(0, prompt)]).hidden)
    texts = _recorded(model, device, reference) if whole and model.facts.length_epochs is None else None
    if communicator is not None:
        communicator.close()
    return answers, full, texts


def _recorded(model: Model, device: Device, reference: Reference) -> torch.Tensor:
    """What the logits of recorded texts are off by, row by row: of the answer, then of the prompt where all of it was recorded."""
    off = []
    for name in sorted(name for names in turns(reference) for name in names):
        prompt, want = _prompt(reference, name), reference[f"{name}.logits"]
        ids = [*prompt, *reference[f"{name}.tokens"].tolist()]
        run = DirectRun(model, device, 1, len(ids))
        got = run.logits(run.step([(0, ids)]).hidden)
        off.append(rows_off(got[len(prompt) - 1 :][: len(want)], want))
        if f"{name}.full_logits" in reference:
            off.append(rows_off(got[: len(prompt)], reference[f"{name}.full_logits"]))
    return torch.cat(off)


def _greedy(name: str, answer: Answer, reference: Reference, tolerance: Tolerance) -> tuple[Finding, Finding]:
    return compare_greedy(name, *answer, reference[f"{name}.tokens"].tolist(), reference[f"{name}.logits"], tolerance)


def _check_engine(path: Path, device: str, reference: Reference, terms: Terms) -> list[Finding]:
    """Through the engine: greedy tokens, and the log-probabilities of the likeliest ids at every position."""
    longest = max(len(_prompt(reference, name)) + len(reference[f"{name}.tokens"]) for names in turns(reference) for name in names)
    findings: list[Finding] = []
    sizes = COMPILED if _static_shapes(device) else {"kv_cache_memory_bytes": POOL_BYTES}
    with LLM(str(path), device=device, dtype=terms.dtype, max_model_len=longest, tensor_parallel_size=terms.ranks, **sizes) as llm:
        for names in turns(reference):
            params = [greedy_params(reference, name) for name in names]
            outputs = llm.generate([{"prompt_token_ids": _prompt(reference, name)} for name in names], params, use_tqdm=False)
            for name, output in zip(names, outputs, strict=True):
                findings += _findings(name, output, reference, terms.tolerance)
    return findings


def _static_shapes(device: str) -> bool:
    return any(Feature.STATIC_SHAPES in info.features for info in find(device).devices()[:1])


def _findings(name: str, output: RequestOutput, reference: Reference, tolerance: Tolerance) -> list[Finding]:
    answer = output.outputs[0]
    findings = engine_findings(name, list(answer.token_ids), answer.logprobs or [], reference, tolerance)
    got = [row for row in output.prompt_logprobs or () if row is not None]
    if got:
        findings.append(logprobs_finding(f"{name}.engine.prompt_logprobs", got, reference[f"{name}.full_logits"], tolerance))
    return findings


def _prompt(reference: Reference, name: str) -> list[int]:
    ids: list[int] = reference[f"{name}.prompt"].tolist()
    return ids


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
