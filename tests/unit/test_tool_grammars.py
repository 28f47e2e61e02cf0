"""Calls that are forced, or free to come in a text: what a family's grammar allows, its parser reads as calls that fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from grammar_walk import accepts, maker, sample_tokenizer, walk
from pagoda.hal.errors import RequestError
from pagoda.serving.engine.structured import StructuredOutputsParams
from pagoda.serving.frontend.parsers.answers import AnswerFormat
from pagoda.serving.frontend.parsers.choose import choose, families
from pagoda.serving.frontend.parsers.events import CallArguments, CallName, Content, Context, Event, Family, Hints
from pagoda.serving.frontend.parsers.harmony import HARMONY
from pagoda.serving.frontend.parsers.thinking import THINK
from pagoda.serving.frontend.structured.answers import ToolRule, answer_structure
from pagoda.serving.frontend.structured.maker import GrammarMaker
from pagoda.serving.frontend.structured.tool_calls import OfferedTool
from pagoda.serving.frontend.text import Tokenizer

Make = Callable[..., GrammarMaker]
SCHEMAS = {
    "weather": {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Oslo é"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["city"],
    },
    "stop": {"type": "object", "properties": {"now": {"type": "boolean"}}, "required": ["now"]},
}
TOOLS = [OfferedTool(name, schema) for name, schema in SCHEMAS.items()]
FAMILIES = {family.names[0]: family for family in families("tools") if family.shapes and not family.shapes[0].final}
JSON_FAMILIES = sorted(name for name, family in FAMILIES.items() if family.shapes[0].style == "json")
MARKS = ("[TOOL_CALLS]", "<|tool_call|>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return sample_tokenizer(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def marked(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Its marks are special tokens, as most models' are."""
    return sample_tokenizer(tmp_path_factory.mktemp("marked"), (*MARKS, "<tool_call>", "[ARGS]"))


@pytest.fixture(scope="module")
def make() -> Make:
    """Makers by vocabulary and backend, each with one process that compiles."""
    made: dict[tuple[int, str], GrammarMaker] = {}

    def make(tokenizer: Tokenizer, backend: str = "auto") -> GrammarMaker:
        return made.setdefault((id(tokenizer), backend), maker(tokenizer, backend))

    return make


def structure(family: str, tokenizer: Tokenizer, wanted: Any = None, tools: Any = TOOLS, **rule: Any) -> StructuredOutputsParams:
    made = answer_structure(wanted, tools, ToolRule(**rule), AnswerFormat(FAMILIES[family]), tokenizer, "")
    assert made is not None
    return made


def read(family: str, text: str) -> tuple[str, list[tuple[str, Any]]]:
    """Content and calls, by the family's parser."""
    parser = FAMILIES[family].make(Context(SCHEMAS))
    events: list[Event] = [event for char in text for event in parser.feed(char)] + parser.finish()
    calls: list[list[str]] = []
    for event in events:
        if isinstance(event, CallName):
            calls.append([event.name, ""])
        elif isinstance(event, CallArguments):
            calls[event.index][1] += event.text
    return "".join(event.text for event in events if isinstance(event, Content)), [(name, json.loads(text)) for name, text in calls]


def check(calls: list[tuple[str, Any]]) -> None:
    for name, arguments in calls:
        jsonschema.validate(arguments, SCHEMAS[name])


@pytest.mark.parametrize("words", ["plain", "marked"])
@pytest.mark.parametrize("family", FAMILIES)
def test_forced_calls_are_calls(family: str, words: str, request: pytest.FixtureRequest, make: Make) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(words)
    counts, seen = set(), set()
    for parallel in (True, False):
        grammar = make(tokenizer)(structure(family, tokenizer, forced=True, parallel=parallel))
        for seed in range(12):
            tokens = walk(grammar, tokenizer, seed, most=3000)
            assert tokens is not None
            content, calls = read(family, tokenizer.decode(tokens, skip_special_tokens=False))
            check(calls)
            assert calls and not content.strip()
            assert parallel or len(calls) == 1
            counts.add(len(calls))
            seen |= {name for name, _ in calls}
    assert seen == set(SCHEMAS) and max(counts) > 1


@pytest.mark.parametrize("backend", ["xgrammar", "guidance"])
@pytest.mark.parametrize("words", ["plain", "marked"])
@pytest.mark.parametrize("family", JSON_FAMILIES)
def test_calls_in_a_text(family: str, words: str, backend: str, request: pytest.FixtureRequest, make: Make) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(words)
    grammar = make(tokenizer, backend)(structure(family, tokenizer))
    forced = make(tokenizer, backend)(structure(family, tokenizer, forced=True))
    tokens = walk(forced, tokenizer, 3)
    assert tokens is not None
    call = tokenizer.decode(tokens, skip_special_tokens=False)
    assert accepts(grammar, tokenizer, "Good day,\n\tsir.") and accepts(grammar, tokenizer, call)
    assert not accepts(forced, tokenizer, "Good day.")
    name, other = read(family, call)[1][0][0], "breakfast"
    assert not accepts(grammar, tokenizer, call.replace(name, other))
    if FAMILIES[family].shapes[0].trigger:
        content, calls = read(family, f"I look. {call}")
        assert accepts(grammar, tokenizer, f"I look. {call}") and calls and content.strip() == "I look."


def test_other_backends_write_the_same_calls(plain: Tokenizer, make: Make) -> None:
    for family in JSON_FAMILIES:
        both = [make(plain, backend)(structure(family, plain, forced=True)) for backend in ("xgrammar", "guidance")]
        for seed in range(4):
            for one, other in (both, both[::-1]):
                tokens = walk(one, plain, seed, most=3000)
                assert tokens is not None and accepts(other, plain, plain.decode(tokens, skip_special_tokens=False))


def test_a_schema_beyond_one_backend_is_kept_by_the_other(plain: Tokenizer, make: Make) -> None:
    tools = [
        OfferedTool(
            "weather", {"type": "object", "properties": {"city": {"type": "string", "pattern": "^[A-C]{3}$"}}, "required": ["city"]}
        )
    ]
    grammar = make(plain)(structure("hermes", plain, tools=tools, forced=True))
    assert accepts(grammar, plain, '<tool_call>\n{"name": "weather", "arguments": {"city": "ABC"}}\n</tool_call>')
    assert not accepts(grammar, plain, '<tool_call>\n{"name": "weather", "arguments": {"city": "ABD"}}\n</tool_call>')
    with pytest.raises(RequestError, match="uniqueItems") as told:
        make(plain)(structure("hermes", plain, tools=[OfferedTool("f", {"type": "array", "uniqueItems": True})], forced=True))
    assert told.value.param == "tool_choice"


def test_arguments_that_nothing_binds_are_an_object(plain: Tokenizer, make: Make) -> None:
    tools = [OfferedTool("weather", None), TOOLS[1]]
    grammar = make(plain)(structure("hermes", plain, tools=tools))
    assert accepts(grammar, plain, '<tool_call>\n{"name": "weather", "arguments": {"any": [1]}}\n</tool_call>')
    assert not accepts(grammar, plain, '<tool_call>\n{"name": "stop", "arguments": {"any": [1]}}\n</tool_call>')


def test_a_format_beside_tools(plain: Tokenizer, make: Make) -> None:
    wanted = StructuredOutputsParams(json=SCHEMAS["stop"], origin="response_format")
    grammar = make(plain)(structure("hermes", plain, wanted=wanted))
    assert accepts(grammar, plain, '{"now": true}')
    assert accepts(grammar, plain, '<tool_call>\n{"name": "stop", "arguments": {"now": true}}\n</tool_call>')
    assert not accepts(grammar, plain, "Good day.")


def test_reasoning_before_forced_calls(plain: Tokenizer, make: Make) -> None:
    answers = AnswerFormat(FAMILIES["hermes"], THINK)
    made = answer_structure(None, TOOLS, ToolRule(True), answers, plain, "<|assistant|><think>\n")
    assert made is not None and made.thinking is not None and made.thinking.begun
    grammar = make(plain)(made)
    assert accepts(grammar, plain, 'Hm {"</think><tool_call>\n{"name": "stop", "arguments": {"now": true}}\n</tool_call>')
    assert not accepts(grammar, plain, "Hm</think>No.")
    ended = answer_structure(None, TOOLS, ToolRule(True), answers, plain, "<think>\n\n</think>\n\n")
    assert ended is not None and ended.thinking is None


@pytest.mark.parametrize("special", [(), ("<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|start|>", "<|call|>", "<|return|>")])
def test_calls_in_channels(special: tuple[str, ...], tmp_path: Path) -> None:
    tokenizer = sample_tokenizer(tmp_path, special)
    made = maker(tokenizer)
    thought = "<|channel|>analysis<|message|>Hm {.<|end|><|start|>assistant"
    call = '<|channel|>commentary to=functions.stop <|constrain|>json<|message|>{"now": true}<|call|>'
    wrong, final = call.replace("true", "1"), "<|channel|>final<|message|>No."
    grammars = [
        made(answer_structure(None, TOOLS, ToolRule(forced), AnswerFormat(HARMONY), tokenizer, "") or StructuredOutputsParams())
        for forced in (True, False)
    ]
    for grammar in grammars:
        for before in ("", thought, thought * 2):
            assert accepts(grammar, tokenizer, before + call) and not accepts(grammar, tokenizer, before + wrong)
            assert accepts(grammar, tokenizer, before + final) == (grammar is grammars[1])
    assert not any(accepts(grammar, tokenizer, "No.") for grammar in grammars)


MUSE_CALL = (
    ' to=stop<|message|><atem:function_calls>\n<atem:invoke name="stop">\n<atem:parameter name="now">true</atem:parameter>\n'
    "</atem:invoke>\n</atem:function_calls><|eom|>"
)
INKLING_CALL = '<|content_invoke_tool_json|>{"name":"stop","args":{"now": true}}<|end_message|>'
BLOCKS = {
    "muse": (" to=self<|message|>Hm {.<|eom|><|start|>assistant", MUSE_CALL, "<|start|>assistant", " to=user<|message|>No."),
    "inkling": ("<|content_thinking|>Hm {.<|end_message|><|message_model|>", INKLING_CALL, "<|message_model|>", "<|content_text|>No."),
}


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("name", BLOCKS)
def test_calls_in_messages(name: str, special: bool, tmp_path: Path) -> None:
    thought, call, between, final = BLOCKS[name]
    family = next(family for family in families("tools") if name in family.names)
    tokenizer = sample_tokenizer(tmp_path, family.marks if special else ())
    made = maker(tokenizer)
    for forced in (True, False):
        asked = answer_structure(None, TOOLS, ToolRule(forced), AnswerFormat(family), tokenizer, "")
        grammar = made(asked or StructuredOutputsParams())
        for before in ("", thought, thought * 2):
            assert accepts(grammar, tokenizer, before + call) and accepts(grammar, tokenizer, before + call + between + call)
            assert not accepts(grammar, tokenizer, before + call.replace("true", "1"))
            assert accepts(grammar, tokenizer, before + final) != forced
        assert not accepts(grammar, tokenizer, "No.")
    parser = family.make(Context(SCHEMAS))
    events = [event for char in call + between + call for event in parser.feed(char)] + parser.finish()
    assert [event.name for event in events if isinstance(event, CallName)] == ["stop", "stop"]


def test_suffixes_are_in_the_grammar(plain: Tokenizer, make: Make) -> None:
    for name in ("hy_v3", "hy_v4"):
        family = choose("tools", name, "", hints=Hints(["<arg_key:x1>"]))
        made = answer_structure(None, TOOLS, ToolRule(True), AnswerFormat(family), plain, "")
        assert made is not None and family is not None
        grammar, separator, line = make(plain)(made), *(("<tool_sep:x1>", "\n") if name == "hy_v3" else ("", ""))
        pair = f"<arg_key:x1>now</arg_key:x1>{line}<arg_value:x1>true</arg_value:x1>{line}"
        text = f"<tool_calls:x1>{line}<tool_call:x1>stop{separator}{line}{pair}</tool_call:x1>{line}</tool_calls:x1>"
        assert accepts(grammar, plain, text) and not accepts(grammar, plain, text.replace(":x1", ""))


def test_arguments_key_by_key(plain: Tokenizer, make: Make) -> None:
    schema = {
        "type": "object",
        "properties": {
            "a": {"type": "string"},
            "b": {"type": "array", "items": {"enum": ["x", 2, None]}},
            "c": {"type": "object", "properties": {"d": {"type": "number"}}, "required": ["d"]},
        },
        "required": ["b"],
    }
    tools = [OfferedTool("f", schema), OfferedTool("g", {"type": "object", "properties": {}})]
    ways = {
        "gemma4": (
            "<|tool_call>call:f{{{}}}<tool_call|>",
            ['a:<|"|>t {<|"|>,b:[]', 'b:[<|"|>x<|"|>,2,null],c:{d:1.5}', "b:[]"],
            ["", 'a:<|"|>t<|"|>', "b:[3]"],
        ),
        "pythonic": ("[f({})]", ['a="t", b=[]', 'b=["x", 2], c={"d": 1.5}'], ["", 'a="t"', "b=[3]"]),
    }
    for family, (around, right, wrong) in ways.items():
        grammar = make(plain)(structure(family, plain, tools=tools, forced=True))
        assert all(accepts(grammar, plain, around.format(text)) for text in right), family
        assert not any(accepts(grammar, plain, around.format(text)) for text in wrong), family
    for name, bad in (("a list with bounds", {"type": "array", "minItems": 2}), ("a value of type None", {"anyOf": []})):
        with pytest.raises(RequestError, match=name):
            structure("gemma4", plain, tools=[OfferedTool("f", {"type": "object", "properties": {"a": bad}})], forced=True)


def test_a_family_without_a_shape_is_named(plain: Tokenizer) -> None:
    stranger = Family("tools", ("stranger",), FAMILIES["hermes"].make)
    with pytest.raises(RequestError, match="stranger"):
        answer_structure(None, TOOLS, ToolRule(True), AnswerFormat(stranger), plain, "")
    assert answer_structure(None, [OfferedTool("f", None)], ToolRule(), AnswerFormat(stranger), plain, "") is None
