"""Walks through a grammar: tokens drawn from its masks until it ends, so that whatever it allows can come."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
from frontend_samples import byte_level
from pagoda.serving.engine.grammar import Grammar
from pagoda.serving.engine.structured import StructuredOutputsConfig
from pagoda.serving.frontend.load import load_tokenizer
from pagoda.serving.frontend.structured.maker import GrammarMaker
from pagoda.serving.frontend.text import Tokenizer
from tokenizers import AddedToken

SPARE = 40
"""Rows of a model's logits beyond its tokenizer's words."""


def sample_tokenizer(folder: Path, special: tuple[str, ...] = ()) -> Tokenizer:
    made = byte_level()
    made.add_special_tokens([AddedToken(name, special=True) for name in special])
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    return load_tokenizer(folder)


def maker(tokenizer: Tokenizer, backend: Any = "auto") -> GrammarMaker:
    return GrammarMaker(StructuredOutputsConfig(backend), lambda: tokenizer, tokenizer.vocab_size + SPARE)


def allowed(matcher: Any, tokenizer: Tokenizer) -> list[int]:
    rows = tokenizer.vocab_size + SPARE
    mask = np.zeros((rows + 31) // 32, np.int32)
    matcher.fill(mask)  # what fills the last word is no row
    return [int(i) for i in np.flatnonzero(np.unpackbits(mask.view(np.uint8), count=rows, bitorder="little"))]


def walk(grammar: Grammar, tokenizer: Tokenizer, seed: int, most: int = 600) -> list[int] | None:
    """The tokens of one output, without the end token; None where it did not end. Ends and long tokens are liked."""
    matcher, chosen, tokens = grammar(), random.Random(seed), list[int]()
    for _ in range(most):
        choices = allowed(matcher, tokenizer)
        assert choices and max(choices) < tokenizer.vocab_size
        ends = set(choices) & set(tokenizer.eos_ids)
        if ends and (len(ends) == len(choices) or chosen.random() < 0.4):
            return tokens
        others = [token for token in choices if token not in ends]
        token = chosen.choice([token for token in others if tokenizer.token_bytes(token).strip()] or others)
        before = allowed(matcher, tokenizer)
        assert matcher.advance(token)
        matcher.go_back()
        assert allowed(matcher, tokenizer) == before
        matcher.accept([token])
        tokens.append(token)
    return None


def accepts(grammar: Grammar, tokenizer: Tokenizer, text: str) -> bool:
    """Whether the grammar takes this text, and may end after it."""
    matcher = grammar()
    ids = tokenizer.encode(text, add_special_tokens=False)
    return all(matcher.advance(token) for token in ids) and bool(matcher.advance(tokenizer.eos_ids[0]))


def schema(draw: random.Random, depth: int = 0) -> dict[str, Any]:
    """One of many shapes; numbers and texts have bounds, so that walks end."""
    kind = draw.choice(["integer", "string", "boolean", "null", "enum", "const", *(["object", "array", "anyOf"] if depth < 3 else [])])
    if kind == "object":
        names = draw.sample(["a", "bc", "d é", 'e"', "f"], draw.randint(0, 4))
        made = {"type": "object", "properties": {name: schema(draw, depth + 1) for name in names}}
        return made | {"required": draw.sample(names, draw.randint(0, len(names)))} | draw.choice([{}, {"additionalProperties": False}])
    if kind == "array":
        least = draw.randint(0, 2)
        return {"type": "array", "items": schema(draw, depth + 1), "minItems": least, "maxItems": least + draw.randint(0, 2)}
    if kind == "anyOf":
        return {"anyOf": [schema(draw, depth + 1) for _ in range(draw.randint(1, 3))]}
    low = draw.randint(-200, 200)
    return {
        "integer": {"type": "integer", "minimum": low, "maximum": low + draw.randint(0, 300)},
        "string": {"type": "string", **draw.choice([{"maxLength": 6}, {"pattern": "^[a-c]{1,4}$"}, {"minLength": 1, "maxLength": 3}])},
        "boolean": {"type": "boolean"},
        "null": {"type": "null"},
        "enum": {"enum": draw.sample(["x", 3, None, True, "é\n"], 2)},
        "const": {"const": draw.choice(["k", 7, False])},
    }[kind]
