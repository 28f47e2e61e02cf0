"""Compares every kind of native block on two ranks, and every mixer in chunks, after a prefix hit and after preemption.

    python ci/block_table.py DIR [--device cpu] [--only WORD]

DIR holds checkpoints as the parity oracle makes them, in a folder a task: those that `ci/block_kinds.py` names (`--list` prints them by
task, as `python -m parity.make` takes them; the rest is made by `ci/more_references.py`). Writes docs/parity/blocks.json and
blocks.md; `--check` says whether the page is stale.
With `--only`, kinds whose name or checkpoint has WORD, and those that the file lacks; what it says of others stays.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import sys
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from block_kinds import MIXERS, MORE, SECTIONS, Kind
from pagoda.hal.device import Backend
from pagoda.hal.discovery import choose
from pagoda.hal.errors import PagodaError
from pagoda.models.load import describe, open_checkpoint
from pagoda.models.spec import DecoderSpec
from pagoda.serving.cli.parity_answers import engine_findings, greedy_params
from pagoda.serving.cli.parity_run import POOL_BYTES, REFERENCE, check
from pagoda.serving.conformance.comparison import Finding, Tolerance
from pagoda.serving.engine.messages import EngineStats
from pagoda.serving.frontend.outputs import RequestOutput
from pagoda.serving.sdk import AsyncLLM
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "docs/parity/blocks.json"
PAGE = ROOT / "docs/parity/blocks.md"
CHUNK = 16
"""Tokens of a step where prompts of up to 70 are to come in pieces."""

POOLS = (6, 8, 10, 12, 16, 20, 26, 34, 44, 60, 80, 110, 150)
"""Pages of a cache, the first of them that holds one request and not five."""

Reference = dict[str, torch.Tensor]
Result = dict[str, Any]


def compared(kind: Kind, folder: Path, backend: Backend) -> Result:
    """One model on two ranks. A checkpoint that lacks the block is a mistake of the table's."""
    path = folder / kind.checkpoint
    if not (path / REFERENCE).is_file():
        return {"passed": False, "error": "no such checkpoint; make it with python -m parity.make"}
    pooling = kind.checkpoint.split("/")[0] in ("embed", "classify", "reward")
    try:
        spec = describe(open_checkpoint(path), dtype="float32").spec
        if not isinstance(spec, DecoderSpec) or not kind.there(spec):
            return {"passed": False, "error": "the checkpoint has no such block"}
        report = check(path, backend, 2)
    except PagodaError as error:
        return {"passed": False, "error": f"{type(error).__name__}: {error}"}
    return _result(report.findings, report.error.replace(str(path), path.name)) | ({"pooling": True} if pooling else {})


def _result(findings: Iterable[Finding], error: str = "") -> Result:
    found = list(findings)
    red = [f"{one.name}: {one.note or f'off by {one.error:.2g}'}" for one in found if not one.passed]
    worst = max((one.error for one in found), default=0.0)
    why = error or "; ".join(red[:3])
    return {"passed": bool(found) and not why, "worst": float(f"{worst:.1e}"), **({"error": why} if why else {})}


async def _ask(
    path: Path, device: str, reference: Reference, names: list[str], in_turn: bool = False, **engine: Any
) -> tuple[list[RequestOutput], EngineStats]:
    """Answers to all prompts, at once or one after another, and what the engine counted."""
    longest = max(len(reference[f"{name}.prompt"]) + len(reference[f"{name}.tokens"]) for name in names)
    options = {"max_model_len": longest, "dtype": "float32", "skip_tokenizer_init": True, **engine}
    async with AsyncLLM(str(path), device=device, **options) as llm:

        async def one(name: str, place: int) -> RequestOutput:
            prompt = {"prompt_token_ids": reference[f"{name}.prompt"].tolist()}
            async for output in llm.generate(prompt, greedy_params(reference, name, False), f"{name}.{place}"):
                last = output
            return last

        asked = [one(name, place) for place, name in enumerate(names)]
        outputs = [await each for each in asked] if in_turn else list(await asyncio.gather(*asked))
        return outputs, await llm.session.client.stats()


def _findings(outputs: list[RequestOutput], names: list[str], reference: Reference) -> list[Finding]:
    found: list[Finding] = []
    for name, output in zip(names, outputs, strict=True):
        answer = output.outputs[0]
        found += engine_findings(name, list(answer.token_ids), answer.logprobs or [], reference, Tolerance())
    return found


def chunked(path: Path, device: str, reference: Reference) -> Result:
    names = ["p3", "b2", "p2"]
    outputs, stats = asyncio.run(_ask(path, device, reference, names, max_num_batched_tokens=CHUNK, kv_cache_memory_bytes=POOL_BYTES))
    return _result(_findings(outputs, names, reference)) | {"steps": stats.steps}


def prefix(path: Path, device: str, reference: Reference) -> Result:
    """The longest prompt three times, one after another."""
    names = ["p3"] * 3
    outputs, _ = asyncio.run(_ask(path, device, reference, names, in_turn=True, kv_cache_memory_bytes=POOL_BYTES))
    hits = [output.num_cached_tokens or 0 for output in outputs]
    result = _result(_findings(outputs, names, reference)) | {"hits": hits}
    return result if hits[-1] > 0 else result | {"passed": False, "error": f"nothing was found again: {hits}"}


def preempted(path: Path, device: str, reference: Reference) -> Result:
    names, why = ["p3", "p2", "b2", "b1", "b0"], ""
    for pages in POOLS:
        try:
            outputs, stats = asyncio.run(_ask(path, device, reference, names, num_gpu_blocks_override=pages, block_size=16))
        except PagodaError as error:
            why = f"{type(error).__name__}: {error}"
            continue
        result = _result(_findings(outputs, names, reference)) | {"pages": pages, "preemptions": stats.preemptions}
        return result if stats.preemptions else result | {"note": "none: who is let in needs no more pages"}
    return {"passed": False, "error": why}


WAYS: dict[str, Callable[[Path, str, Reference], Result]] = {"chunks": chunked, "prefix": prefix, "preemption": preempted}


def mixed(kind: Kind, folder: Path, device: str) -> Result:
    """One mixer in each way."""
    path = folder / kind.checkpoint
    if not (path / REFERENCE).is_file():
        return {"error": "no such checkpoint; make it with python -m parity.make"}
    reference, found = load_file(path / REFERENCE), {}
    for name, way in WAYS.items():
        try:
            found[name] = way(path, device, reference)
        except Exception as error:  # one model must not end the table
            found[name] = {"passed": False, "error": f"{type(error).__name__}: {error}"}
        print("pass" if found[name]["passed"] else "FAIL", kind.name, name, found[name].get("error", "")[:200], flush=True)
    return found


def rows(folder: Path, device: str, only: str | None, old: dict[str, Any]) -> Iterator[Result]:
    """A row a kind, in order. `old`: the document before, of which stays what `only` leaves out."""
    backend = choose(device).backend
    kept = {(row["section"], row["kind"]): row for row in old.get("blocks", ())}
    seen: dict[str, Result] = {}
    for section, kinds in SECTIONS.items():
        for kind in kinds:
            row = kept.get((section, kind.name))
            if row is None or only is None or only in kind.name or only in kind.checkpoint:
                result = compared(kind, folder, backend)
                print("pass" if result["passed"] else "FAIL", section, kind.name, result.get("error", "")[:200], flush=True)
                row = {"section": section, "kind": kind.name, "checkpoint": kind.checkpoint, "tp 2": result}
                if kind in MIXERS:
                    row |= seen.setdefault(kind.checkpoint, mixed(kind, folder, device))
            yield row


def document(blocks: list[Result], device: str) -> dict[str, Any]:
    head = {"made": f"{datetime.now(UTC):%Y-%m-%d}", "device": device, "machine": platform.machine(), "torch": torch.__version__}
    return {**head, "blocks": blocks}


HEAD = """# Blocks compared

Made by `python ci/block_table.py DIR`; do not edit. One model of each kind of block that runs natively, against transformers' recorded
answers in float32: greedy tokens, their logits and log-probabilities, hidden states or scores. **tp 2**: on two ranks; the figure is the
largest error in standard deviations of the reference. Of each mixer also: **chunks**, prompts of 33 and 70 tokens in steps of at most 16;
**prefix**, a prompt whose tokens are found in the cache (how many); **preemption**, five requests in a cache that holds fewer (how often
one was computed again; *none* where whoever is let in needs no more pages).
"""


def page(document: dict[str, Any]) -> str:
    blocks = document["blocks"]
    results = [row[way] for row in blocks for way in ("tp 2", *WAYS) if way in row]
    red = sum(not result["passed"] for result in results)
    count = f"{len(results) - red} of {len(results)} comparisons agree"
    where = f"{count}; `{document['device']}`, {document['machine']}, torch {document['torch']}, {document['made']}."
    lines = [HEAD, where]
    for section in SECTIONS:
        own = [row for row in blocks if row["section"] == section]
        ways = ("tp 2", *(WAYS if any("chunks" in row for row in own) else ()))
        lines += ["", f"## {section}", "", f"| block | checkpoint | {' | '.join(ways)} |", "| --- |" + " --- |" * (1 + len(ways))]
        lines += [f"| {row['kind']} | `{row['checkpoint']}` | {' | '.join(_cell(row.get(way, {})) for way in ways)} |" for row in own]
    return "\n".join(lines) + "\n"


def _cell(result: Result) -> str:
    if not result:
        return "–"
    if not result["passed"]:
        return f"**red**: {result['error']}"
    if "hits" in result:
        return f"{result['hits'][-1]} found"
    if "preemptions" in result:
        return f"{result['preemptions']} times" if result["preemptions"] else "none"
    return f"{result['worst']:.0e}"


def listed() -> str:
    """What to make, a line a task."""
    tasks: dict[str, list[str]] = {}
    for kind in (kind for kinds in SECTIONS.values() for kind in kinds if kind.checkpoint not in MORE):
        task, name = kind.checkpoint.split("/")
        tasks.setdefault(task, []).append(name)
    return "\n".join(f"--task {task} {','.join(dict.fromkeys(names))}" for task, names in tasks.items())


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", help="kinds whose name or checkpoint has this word, and those that the file lacks")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--check", action="store_true")
    asked = parser.parse_args(arguments)
    if asked.list:
        print(listed())
        return 0
    old = json.loads(TARGET.read_text(encoding="utf-8")) if TARGET.exists() else {}
    if asked.check:
        return 0 if PAGE.exists() and PAGE.read_text(encoding="utf-8") == page(old) else 1
    made: list[Result] = []
    for row in rows(asked.folder, asked.device, asked.only, old):
        made.append(row)
        later = [row for row in old.get("blocks", ()) if row["kind"] not in {done["kind"] for done in made}]
        TARGET.write_text(json.dumps(document([*made, *later], asked.device), indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(document(made, asked.device)), encoding="utf-8")
    results = [row[way] for row in made for way in ("tp 2", *WAYS) if way in row]
    return 0 if all(result["passed"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
