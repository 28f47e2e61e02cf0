"""What structured output costs a decode step: `python benchmarks/structured.py`, in this process.

The same requests, in turns, free and under JSON schemas: `text`, a list of texts, in which the grammar forces next to nothing, so that
what is left is masks and bound rows; `record`, a list of records with fixed keys, as answers look, whose forced tokens take no steps of
their own; `record without jumps`, the same with a step a token. None of them ends before its last token. A step's time is that of a run
less that of the same run with one new token, over the steps in between. Prints a table and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from pagoda import LLM, SamplingParams
from pagoda.serving.frontend.structured.guidance_backend import GuidanceMatcher
from pagoda.serving.frontend.structured.xgrammar_backend import XMatcher

RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind of animal": {"enum": ["cat", "dog"]},
        "age in years": {"type": "integer", "maximum": 99},
    },
    "required": ["name", "kind of animal", "age in years"],
}
SCHEMAS: dict[str, Any] = {
    "free": None,
    "text": {"type": "array", "items": {"type": "string"}, "minItems": 1000},
    "record": {"type": "array", "items": RECORD, "minItems": 1000},
}
JUMPS_OFF = "record without jumps"


class Run(NamedTuple):
    """Seconds, steps of the engine, tokens that took none."""

    seconds: float
    steps: int
    jumped: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="default: the default model")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=65)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--backend", default="auto", choices=["auto", "xgrammar", "guidance"])
    options = parser.parse_args()
    structured = {"backend": options.backend, "disable_any_whitespace": True}
    settings: dict[str, Any] = {"max_num_seqs": options.rows, "enable_prefix_caching": False, "kv_cache_memory_bytes": 1 << 30}
    with LLM(options.model, structured_outputs_config=structured, use_tqdm_on_load=False, **settings) as llm:
        found = measure(llm, options)
    show(found, options)


def measure(llm: LLM, options: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """Of each kind a record a round."""
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in (*SCHEMAS, JUMPS_OFF)}
    for turn in range(options.rounds + 1):
        draw = random.Random(turn)
        prompts = [draw.choices(range(100, 40_000), k=options.prompt) for _ in range(options.rows)]
        for kind, records in found.items():
            with jumps(kind != JUMPS_OFF):
                schema = SCHEMAS.get(kind, SCHEMAS["record"] if kind == JUMPS_OFF else None)
                first, whole = (run(llm, prompts, tokens, schema) for tokens in (1, options.tokens))
            steps = max(1, whole.steps - first.steps)
            seconds, tokens = whole.seconds - first.seconds, options.tokens - 1
            if turn:  # the first one compiles grammars and records steps
                records.append(
                    {"ms_step": 1e3 * seconds / steps, "ms_token": 1e3 * seconds / tokens, "steps": steps, "jumped": whole.jumped}
                )
    return found


@contextmanager
def jumps(wanted: bool) -> Iterator[None]:
    """Forced tokens take no steps, or one each."""
    kinds: tuple[Any, ...] = (XMatcher, GuidanceMatcher)
    before = [kind.forced for kind in kinds]
    if not wanted:
        for kind in kinds:
            kind.forced = lambda self: []
    yield
    for kind, forced in zip(kinds, before, strict=True):
        kind.forced = forced


def run(llm: LLM, prompts: list[list[int]], tokens: int, schema: Any) -> Run:
    """Greedy answers of so many tokens each."""
    asked = None if schema is None else {"json": schema}
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=schema is None, detokenize=False, structured_outputs=asked)
    before, start = llm.stats(), time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds, after = time.perf_counter() - start, llm.stats()
    assert all(len(output.outputs[0].token_ids) == tokens for output in outputs), "an answer ended early"
    return Run(seconds, after.steps - before.steps, after.jumped_tokens - before.jumped_tokens)


def show(found: dict[str, list[dict[str, float]]], options: argparse.Namespace) -> None:
    middle = {kind: {name: min(one[name] for one in records) for name in records[0]} for kind, records in found.items()}
    free = middle["free"]  # of each, the fastest round: what disturbs a round only adds
    print(f"{'kind':22}{'ms/step':>9}{'ms/token':>10}{'over free':>11}{'steps':>7}{'jumped':>8}")
    for kind, one in middle.items():
        over = f"{one['ms_token'] / free['ms_token'] - 1:+.1%}"
        print(f"{kind:22}{one['ms_step']:9.2f}{one['ms_token']:10.2f}{over:>11}{one['steps']:7.0f}{one['jumped']:8.0f}")
    print(json.dumps({"rows": options.rows, "tokens": options.tokens, "backend": options.backend, **middle}))


if __name__ == "__main__":
    main()
