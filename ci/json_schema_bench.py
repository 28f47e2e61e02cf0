"""Runs larger schemas of the kind people send through the grammars and writes docs/json-schema-large.md:
`python ci/json_schema_bench.py FOLDER`.

FOLDER is `maskbench/data` of a checkout of guidance-ai/jsonschemabench: schemas from GitHub, Kubernetes, SchemaStore and function calls,
each with valid and invalid instances. Of those of 1,000 bytes and more, a sample spread over their sources: each is refused by name, or its
grammar takes the valid instances and none of the invalid ones (an instance counts where `jsonschema` says of it what the file does). Then
the default model writes one output for each schema that was not refused; every output that ends must be valid. Exits with 1 where an
invalid instance is taken or an output is invalid.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
from json_schema_suite import Outcome, outcome
from pagoda import LLM, SamplingParams
from pagoda.serving.engine.config import EngineConfig
from pagoda.serving.engine.structured import StructuredOutputsConfig, StructuredOutputsParams
from pagoda.serving.frontend.load import load_tokenizer, tokenizer_path
from pagoda.serving.frontend.structured.maker import GrammarMaker

PAGE = Path(__file__).resolve().parent.parent / "docs" / "json-schema-large.md"
LARGE = 1000
"""Bytes of a schema from which it is a larger one."""
HEAD = """# Larger JSON schemas in structured outputs

Made by `python ci/json_schema_bench.py FOLDER --count {count}` from the schemas of JSONSchemaBench (maskbench/data); do not edit.

{count} schemas of 1,000 bytes and more, spread over their sources. *kept*: the grammar takes every valid instance and no invalid one;
*narrower*: no invalid one, but it leaves out valid ones too; *refused*: the request gets a 400 which names the feature. No grammar takes an
invalid instance. *outputs*: what SmolLM2-135M-Instruct wrote at temperature 1 under each grammar, ended within {tokens} tokens;
`jsonschema` finds every one of them valid.

"""


@dataclass(frozen=True)
class Row:
    """A schema: its source, name, and instances that `jsonschema` and the file agree on."""

    source: str
    name: str
    schema: dict[str, Any]
    tests: tuple[dict[str, Any], ...]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=400)
    parser.add_argument("--tokens", type=int, default=256, help="most tokens of an output")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rows = list(sample(options.folder, options.count, options.seed))
    tokenizer = load_tokenizer(tokenizer_path(EngineConfig()))
    maker = GrammarMaker(StructuredOutputsConfig(), lambda: tokenizer, tokenizer.vocab_size)
    outcomes = [outcome(maker, tokenizer, row.schema, list(row.tests)) for row in rows]
    wide = [f"{row.name}: {one.detail}" for row, one in zip(rows, outcomes, strict=True) if one.kind == "wider"]
    kept = [row for row, one in zip(rows, outcomes, strict=True) if one.kind != "refused"]
    texts = written(kept, options.tokens, options.seed)
    wrong = [f"{row.name}: {text[:300]}" for row, text in zip(kept, texts, strict=True) if text is not None and not valid(row.schema, text)]
    print("\n".join(wide + wrong))
    head = HEAD.format(count=len(rows), tokens=options.tokens)
    if not wide and not wrong:
        PAGE.write_text(head + table(rows, outcomes, dict(zip((row.name for row in kept), texts, strict=True))), encoding="utf-8")
    print(Counter(one.kind for one in outcomes), sum(text is not None for text in texts), "outputs ended,", len(wrong), "of them wrong")
    return 1 if wide or wrong else 0


def sample(folder: Path, count: int, seed: int) -> Iterator[Row]:
    """Larger schemas, from each source in turn."""
    sources: dict[str, list[Path]] = defaultdict(list)
    for path in sorted(folder.glob("*.json")):
        sources[re.split("---|_[0-9a-z]", path.name)[0]].append(path)
    draw = random.Random(seed)
    for paths in sources.values():
        draw.shuffle(paths)
    turns = {source: _rows(source, paths) for source, paths in sorted(sources.items())}
    while turns and count:
        for source in list(turns):
            row = next(turns[source], None)
            if row is None:
                del turns[source]
            elif count:
                count -= 1
                yield row


def _rows(source: str, paths: list[Path]) -> Iterator[Row]:
    for path in paths:
        read = json.loads(path.read_text(encoding="utf-8"))
        schema = read["schema"]
        if isinstance(schema, dict) and len(json.dumps(schema)) >= LARGE:
            tests = [test for test in read["tests"] if test["valid"] == valid(schema, json.dumps(test["data"]))]
            yield Row(source, path.stem, schema, tuple(tests))


def valid(schema: dict[str, Any], text: str) -> bool:
    """What `jsonschema` says, formats and all; a text that is no JSON is not valid."""
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        kind(schema, format_checker=kind.FORMAT_CHECKER).validate(json.loads(text))
    except (jsonschema.ValidationError, json.JSONDecodeError):
        return False
    return True


def written(rows: list[Row], tokens: int, seed: int) -> list[str | None]:
    """The model's output for each schema; None where it did not end."""
    prompts = [f"An example of {row.name.replace('_', ' ')} as JSON:\n" for row in rows]
    params = [
        SamplingParams(temperature=1.0, max_tokens=tokens, seed=seed, structured_outputs=StructuredOutputsParams(json=row.schema))
        for row in rows
    ]
    with LLM(max_model_len=2048) as llm:
        outputs = llm.generate(prompts, params)
    return [one.outputs[0].text if one.outputs[0].finish_reason == "stop" else None for one in outputs]


def table(rows: list[Row], outcomes: list[Outcome], texts: dict[str, str | None]) -> str:
    """In Markdown."""
    lines = ["| source | schemas | instances | kept | narrower | refused | outputs |", "| --- |" + " ---: |" * 6]
    for source in [*sorted({row.source for row in rows}), "all"]:
        ones = [(row, one) for row, one in zip(rows, outcomes, strict=True) if source in (row.source, "all")]
        kinds = Counter(one.kind for _, one in ones)
        ended = sum(texts.get(row.name) is not None for row, _ in ones)
        cells = [len(ones), sum(len(row.tests) for row, _ in ones), kinds["kept"], kinds["narrower"], kinds["refused"], ended]
        lines.append(f"| {source} | {' | '.join(map(str, cells))} |")
    why = Counter(name for one in outcomes if one.kind == "refused" for name in one.detail.split(", "))
    return "\n".join([*lines, "", "Refused for: " + ", ".join(f"`{name}` ({count})" for name, count in why.most_common()) + "."]) + "\n"


if __name__ == "__main__":
    sys.exit(main())
