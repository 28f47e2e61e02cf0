"""The conformance walk over a sample of schemas: kept, narrower, refused; and a grammar that takes too much is noticed."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from grammar_walk import maker, sample_tokenizer
from pagoda.hal.errors import RequestError
from pagoda.serving.engine.structured import StructuredOutputsParams

_SPEC = importlib.util.spec_from_file_location("json_schema_suite", Path(__file__).parents[2] / "ci" / "json_schema_suite.py")
assert _SPEC is not None and _SPEC.loader is not None
suite = importlib.util.module_from_spec(_SPEC)
sys.modules[_SPEC.name] = suite
_SPEC.loader.exec_module(suite)

SAMPLE: list[tuple[Any, list[Any], list[Any], str]] = [
    ({"type": "integer"}, [1, -3, 1.0], ["a", 1.5, None], "kept"),
    ({"type": ["integer", "null"]}, [1, None], ["a"], "kept"),
    ({"properties": {"a": {"type": "string"}}, "required": ["a"]}, [{"a": "x"}, {"b": 1, "a": "x"}, 3], [{"b": 1}, {"a": 1}], "kept"),
    ({"patternProperties": {"^a": {"type": "integer"}}, "additionalProperties": False}, [{"ab": 1}, {}], [{"b": 1}, {"a": "x"}], "kept"),
    ({"prefixItems": [{"type": "integer"}, {"type": "string"}], "items": False}, [[1, "a"], [1]], [["a"], [1, "a", 2]], "kept"),
    ({"anyOf": [{"type": "integer", "minimum": 5}, {"type": "string", "maxLength": 2}]}, [7, "ab"], [2, "abc"], "kept"),
    ({"allOf": [{"minimum": 5}, {"maximum": 7}]}, [6], [8, 4], "kept"),
    ({"$ref": "#/$defs/n", "$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}}}}, [[], [[], [[]]]], [[1], 3], "kept"),
    ({"type": "integer", "multipleOf": 3}, [9, 0], [10], "kept"),
    ({"const": {"a": 1, "b": 2}}, [{"a": 1, "b": 2}, {"b": 2, "a": 1}], [{"a": 1}], "narrower"),
    ({"uniqueItems": True}, [[1, 2]], [[1, 1]], "refused"),
    ({"dependentRequired": {"a": ["b"]}}, [{}], [{"a": 1}], "refused"),
    ({"if": {"type": "integer"}, "then": {"minimum": 3}}, [3], [2], "refused"),
    ({"not": {"type": "integer"}}, ["a"], [2], "refused"),
    ({"oneOf": [{"type": "number"}, {"minimum": 2}]}, [1], [3], "refused"),
    ({"contains": {"type": "integer"}}, [[1]], [["a"]], "refused"),
    ({"propertyNames": {"maxLength": 2}}, [{}], [{"abc": 1}], "refused"),
    ({"unevaluatedProperties": False}, [{}], [{"a": 1}], "refused"),
    ({"$dynamicRef": "#x"}, [], [], "refused"),
    ({"$ref": "http://localhost/elsewhere.json"}, [], [], "refused"),
]


@pytest.mark.parametrize(("schema", "valid", "invalid", "kind"), SAMPLE, ids=[json.dumps(row[0])[:40] for row in SAMPLE])
def test_a_schema(schema: Any, valid: list[Any], invalid: list[Any], kind: str, words: Any) -> None:
    tests = [{"data": one, "valid": True} for one in valid] + [{"data": one, "valid": False} for one in invalid]
    assert suite.outcome(*words, schema, tests).kind == kind


def test_a_grammar_that_takes_too_much_is_told(words: Any) -> None:
    assert suite.outcome(*words, {"type": "integer"}, [{"data": 3, "valid": False}]).kind == "wider"


def test_every_refusal_of_the_sample_names_its_keyword(words: Any) -> None:
    for schema, _, _, kind in SAMPLE:
        if kind == "refused":
            with pytest.raises(RequestError) as told:
                words[0](StructuredOutputsParams(json=schema))
            assert "elsewhere" in str(told.value) or next(iter(schema)) in str(told.value)


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("words")
    tokenizer = sample_tokenizer(folder)
    return maker(tokenizer), tokenizer
