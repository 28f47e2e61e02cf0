"""Runs the official JSON Schema suite through the grammars and writes docs/json-schema.md: `python ci/json_schema_suite.py SUITE`.

SUITE is a checkout of json-schema-org/JSON-Schema-Test-Suite. Each schema is refused by name, or its grammar takes the valid instances and
none of the invalid ones; exits with 1 where an invalid one is taken. `--backend` asks for one library instead of the best for each schema.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from pagoda.hal.errors import RequestError
from pagoda.serving.engine.config import EngineConfig
from pagoda.serving.engine.grammar import Grammar
from pagoda.serving.engine.structured import StructuredOutputsConfig, StructuredOutputsParams
from pagoda.serving.frontend.load import load_tokenizer, tokenizer_path
from pagoda.serving.frontend.structured.maker import GrammarMaker
from pagoda.serving.frontend.text import Tokenizer

PAGE = Path(__file__).resolve().parent.parent / "docs" / "json-schema.md"
DRAFTS = {"draft7": "http://json-schema.org/draft-07/schema#", "draft2020-12": "https://json-schema.org/draft/2020-12/schema"}
HEAD = """# JSON Schema in structured outputs

Made by `python ci/json_schema_suite.py SUITE` from the official test suite; do not edit.

Schemas of each keyword's tests: *kept* means that the grammar takes every valid instance and no invalid one, *narrower* that it takes no
invalid one, but leaves out valid ones too (`format` is an assertion, properties come in the schema's order, also in `const`), *refused*
that the request gets a 400 which names the feature. No schema's grammar takes an invalid instance. An object's unlisted properties were
allowed here (`disable_additional_properties: false`); numbers are compared as they are written shortest.

"""


class Outcome(NamedTuple):
    """Of one schema: kept, narrower, wider or refused, and what is refused or where it went wrong."""

    kind: str
    detail: str = ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("suite", type=Path)
    parser.add_argument("--backend", default="auto")
    options = parser.parse_args()
    tokenizer = load_tokenizer(tokenizer_path(EngineConfig()))
    maker = GrammarMaker(StructuredOutputsConfig(options.backend), lambda: tokenizer, tokenizer.vocab_size)
    rows: dict[str, dict[str, list[Outcome]]] = defaultdict(lambda: defaultdict(list))
    for draft, uri in DRAFTS.items():
        for file in sorted((options.suite / "tests" / draft).glob("*.json")):
            for group in json.loads(file.read_text(encoding="utf-8")):
                rows[file.stem][draft].append(outcome(maker, tokenizer, _dated(group["schema"], uri), group["tests"]))
    wide = [(keyword, one.detail) for keyword, drafts in rows.items() for ones in drafts.values() for one in ones if one.kind == "wider"]
    for keyword, detail in wide:
        print(f"{keyword}: an invalid instance is taken: {detail}")
    if options.backend == "auto" and not wide:
        PAGE.write_text(HEAD + table(rows), encoding="utf-8")
    print(Counter(one.kind for drafts in rows.values() for ones in drafts.values() for one in ones))
    return 1 if wide else 0


def outcome(maker: GrammarMaker, tokenizer: Tokenizer, schema: Any, tests: list[dict[str, Any]]) -> Outcome:
    """What becomes of one schema with its instances."""
    try:
        grammar = maker(StructuredOutputsParams(json=schema, disable_additional_properties=False))
    except RequestError as error:
        return Outcome("refused", _feature(str(error)))
    narrow = False
    for test in tests:
        taken = any(accepts(grammar, tokenizer, text) for text in spellings(test["data"], schema))
        if taken and not test["valid"]:
            return Outcome("wider", f"{json.dumps(schema)[:200]} takes {json.dumps(test['data'])[:80]}")
        narrow |= test["valid"] and not taken
    return Outcome("narrower" if narrow else "kept")


def accepts(grammar: Grammar, tokenizer: Tokenizer, text: str) -> bool:
    """Walks the matcher over a text's tokens and the end token."""
    matcher = grammar()
    ids = tokenizer.encode(text, add_special_tokens=False)
    return all(matcher.advance(token) for token in ids) and matcher.advance(tokenizer.eos_ids[0])


def spellings(value: Any, schema: Any) -> Iterator[str]:
    """An instance as it stands, and with properties in the order in which the schema names them and numbers at their shortest."""
    order: dict[str, int] = {}
    _names(schema, order)
    for one in (value, _ordered(value, {}), _ordered(value, order)):
        for separators in ((", ", ": "), (",", ":")):
            yield json.dumps(one, ensure_ascii=False, separators=separators)


def _dated(schema: Any, uri: str) -> Any:
    return {"$schema": uri, **schema} if isinstance(schema, dict) else schema


def _names(schema: Any, order: dict[str, int]) -> None:
    if isinstance(schema, list):
        for child in schema:
            _names(child, order)
    elif isinstance(schema, dict):
        for name in (*(schema.get("properties") or ()), *(schema["required"] if isinstance(schema.get("required"), list) else ())):
            order.setdefault(name, len(order))
        for child in schema.values():
            _names(child, order)


def _ordered(value: Any, order: dict[str, int]) -> Any:
    if isinstance(value, dict):
        names = sorted(value, key=lambda name: order.get(name, len(order)))
        return {name: _ordered(value[name], order) for name in names}
    if isinstance(value, list):
        return [_ordered(one, order) for one in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _feature(message: str) -> str:
    found = re.search(r"can keep to ([^;]*);", message)
    return found[1].replace('"', "") if found else message.partition("followed: ")[2][:60]


def table(rows: dict[str, dict[str, list[Outcome]]]) -> str:
    """In Markdown."""
    lines = ["| keyword | draft 7 | draft 2020-12 | refused for |", "| --- | --- | --- | --- |"]
    for keyword in sorted(rows):
        refused = Counter(
            name for ones in rows[keyword].values() for one in ones if one.kind == "refused" for name in one.detail.split(", ")
        )
        why = ", ".join(f"`{name}`" for name, _ in refused.most_common(3))
        lines.append(f"| `{keyword}` | {' | '.join(_counts(rows[keyword].get(draft, [])) for draft in DRAFTS)} | {why} |")
    return "\n".join(lines) + "\n"


def _counts(outcomes: list[Outcome]) -> str:
    counts = Counter(one.kind for one in outcomes)
    return ", ".join(f"{count} {kind}" for kind in ("kept", "narrower", "refused") if (count := counts[kind])) or "–"


if __name__ == "__main__":
    sys.exit(main())
