"""Answers read by the checkpoint's own description: as transformers reads them, however they are cut; of a text that calls interrupt, it
keeps the last part alone, so that its word counts where nothing does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from grammar_walk import sample_tokenizer
from pagoda.hal.errors import ConfigError
from pagoda.serving.frontend.load import load_text
from pagoda.serving.frontend.parsers.answers import AnswerFormat
from pagoda.serving.frontend.parsers.choose import choose
from pagoda.serving.frontend.parsers.events import CallArguments, CallName, Content, Context, Hints, Reasoning
from pagoda.serving.frontend.parsers.template import read_template
from transformers.utils.chat_parsing.response_parser import parse_response

CALL = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
WHOLE = {"type": "function", "function": {"name": "{content.name}", "arguments": "{content.arguments}"}}
EACH = {"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}}
PROMPT = "<|turn>user\nHi<turn|>\n<|turn>model\n"
GEMMA: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": ["<|turn>model\n", "<tool_response|>"],
    "fields": {
        "content": {"close": ["<turn|>", "<|tool_response>"]},
        "thinking": {"open": "<|channel>thought\n", "close": "<channel|>"},
        "tool_calls": {
            "open_pattern": r"<\|tool_call>call:(?P<name>\w+)",
            "close": "<tool_call|>",
            "repeats": True,
            "content": "json",
            "content_args": {"string_delims": [['<|"|>', '<|"|>']], "unquoted_keys": True},
            "transform": CALL,
        },
    },
}


def turned(**fields: Any) -> dict[str, Any]:
    return {"start_anchor": "<|turn>model\n", "fields": fields}


THINK = {"open": "<think>", "close": "</think>"}
JSON = turned(content={}, thinking=THINK, tool_calls={
    "open": "<tool_call>", "close": "</tool_call>", "repeats": True, "content": "json", "transform": WHOLE,
})  # fmt: skip
LISTED = turned(content={}, tool_calls={
    "open": "<calls>", "close": "</calls>", "content": "json", "transform": EACH, "transform_each": True,
})  # fmt: skip
TAGS = turned(content={}, thinking=THINK, tool_calls={
    "open_pattern": r"<tool_call>\s*<function=(?P<name>[^>]+)>", "close_pattern": r"</function>\s*</tool_call>", "repeats": True,
    "content": "xml-inline", "transform": CALL,
    "content_args": {"tag_pattern": r"<parameter=(?P<key>\w+)>\n?(?P<value>.*?)\n?</parameter>"},
})  # fmt: skip
LINES = turned(content={"open": "<answer>", "close": "</answer>"}, thinking=THINK, tool_calls={
    "open_pattern": r"CALL (?P<name>\w+)\n", "close": "END", "repeats": True, "content": "kv-lines", "transform": CALL,
})  # fmt: skip
TOOLS = {
    "alarm": {"type": "object", "properties": {"hour": {"type": "integer"}, "label": {"type": "string"}, "on": {"type": "boolean"}}},
    "look": {"type": "object", "properties": {"q": {"type": "string"}, "deep": {"type": "object"}}},
}
OFFERED = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in TOOLS.items()]
ONE, TWO = '{"name": "alarm", "arguments": {"hour": 7, "label": "a } b"}}', '{"name": "look", "arguments": {"deep": {"x": [1, null]}}}'
ANSWERS: list[tuple[str, dict[str, Any], str]] = [
    ("plain", GEMMA, "Hello there."),
    ("closed", GEMMA, "Hello there.<turn|>"),
    ("thoughts", GEMMA, "<|channel>thought\nplan <b>\n<channel|>The answer.<turn|>"),
    ("call", GEMMA, 'Hm.<|tool_call>call:alarm{hour:7,label:<|"|>mor"ning {<|"|>,on:true}<tool_call|>'),
    ("calls", GEMMA, '<|tool_call>call:alarm{hour:7}<tool_call|><|tool_call>call:look{deep:{a:[1,{b:<|"|>}<|"|>}]}}<tool_call|>'),
    ("json", JSON, f"<think>\nHm.\n</think>\n\nLook:\n<tool_call>\n{ONE}\n</tool_call><tool_call>{TWO}</tool_call>"),
    ("no json", JSON, "a < b <tool_cal"),
    ("listed", LISTED, f"So: <calls>[{ONE}, {TWO}]</calls>"),
    ("tags", TAGS, "<think>x</think>Go.\n<tool_call>\n<function=alarm>\n<parameter=hour>\n7\n</parameter>\n"
     "<parameter=label>\n12\n</parameter>\n</function>\n</tool_call>"),
    ("tags alike", TAGS, "See <tool_call> and <tool_call><func is none"),
    ("lines", LINES, "<think>Hm</think>noise<answer>Yes.</answer>CALL alarm\nhour: 8\nlabel: x\nEND"),
]  # fmt: skip


def form_of(template: dict[str, Any]) -> AnswerFormat:
    hints = Hints(response=template)
    reasoning = choose("reasoning", "hf", "", hints=hints) if "thinking" in template["fields"] else None
    return AnswerFormat(choose("tools", "hf", "", hints=hints), reasoning)


def said(form: AnswerFormat, pieces: list[str], prompt: str = PROMPT) -> tuple[str, str, list[tuple[str, str]]]:
    parser = form.parser(Context(TOOLS, prompt))
    assert parser is not None
    content, reasoning, calls = "", "", []
    for event in [event for piece in pieces for event in parser.feed(piece)] + parser.finish():
        match event:
            case Content(text):
                content += text
            case Reasoning(text):
                reasoning += text
            case CallName(_, name):
                calls.append((name, ""))
            case CallArguments(_, text):
                calls[-1] = (calls[-1][0], calls[-1][1] + text)
    return content, reasoning, calls


@pytest.mark.parametrize(("name", "template", "text"), ANSWERS, ids=[name for name, *_ in ANSWERS])
def test_answers_are_read_as_transformers_reads_them_at_every_cut(name: str, template: dict[str, Any], text: str) -> None:
    form = form_of(template)
    content, reasoning, calls = whole = said(form, [text])
    theirs = parse_response(text, template, prefix=PROMPT, tools=OFFERED)
    found = theirs.get("tool_calls") or []
    expected = [(call["function"]["name"], call["function"]["arguments"]) for call in found]
    assert (content.strip(), reasoning) == (theirs.get("content", ""), theirs.get("thinking", ""))
    assert [(name, json.loads(arguments)) for name, arguments in calls] == expected
    assert bool(calls) == (name in ("call", "calls", "json", "listed", "tags", "lines"))
    assert said(form, list(text)) == whole
    for first in range(len(text)):
        assert said(form, [text[:first], text[first:]]) == whole
        for second in range(first + 1, len(text), 7):
            assert said(form, [text[:first], text[first:second], text[second:]]) == whole


@pytest.mark.parametrize(("name", "template", "text"), ANSWERS, ids=[name for name, *_ in ANSWERS])
def test_an_answer_that_ends_anywhere(name: str, template: dict[str, Any], text: str) -> None:
    form = form_of(template)
    for end in range(len(text)):
        assert said(form, list(text[:end])) == said(form, [text[:end]])


def test_the_prompt_has_opened_the_thoughts() -> None:
    form, prompt = form_of(JSON), PROMPT + "<think>\n"
    text = "Hm.\n</think>\n\nYes."
    theirs = parse_response(text, JSON, prefix=prompt)
    assert said(form, list(text), prompt) == said(form, [text], prompt) == (theirs["content"], theirs["thinking"], [])


def test_what_is_no_call_stays_in_the_text() -> None:
    form = form_of(JSON)
    for text in ("x <tool_call>{oops</tool_call> y", '<tool_call>{"name": ""}</tool_call>', "<tool_call>[1]</tool_call>"):
        assert said(form, list(text)) == (text, "", [])


def test_a_checkpoint_that_says_so_is_read_so(tmp_path: Path) -> None:
    sample_tokenizer(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": "{{ tools }}", "response_template": TAGS}))
    answers = load_text(tmp_path).answers
    assert answers.tools is not None and answers.reasoning is not None
    assert (answers.tools.names[0], answers.reasoning.names[0]) == ("hf", "hf")
    assert (answers.reasoning.opens, answers.reasoning.closes) == (("<think>",), ("</think>",))
    assert "<think>" in answers.marks(True) and said(answers, list(ANSWERS[8][2]))[2] == [("alarm", '{"hour": 7, "label": "12"}')]


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (turned(other={}), "fields of content, thinking, tool_calls; found other"),
        (turned(content={}, thinking={}), "at most one field"),
        (turned(content={}, tool_calls={"open_pattern": "[<]x"}), "characters that stand for themselves"),
        (turned(content={}, tool_calls={"open_pattern": "a|b"}), "characters that stand for themselves"),
        (turned(content={"content": "yaml"}), "'yaml'; there is text, json"),
        (turned(content={}, tool_calls={"open_pattern": "x("}), "no expression"),
    ],
)
def test_a_template_that_cannot_be_followed_is_refused(template: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why.replace("[", r"\[")):
        read_template(template)


def test_a_checkpoint_without_one_is_told_so() -> None:
    with pytest.raises(ConfigError, match="--tool-call-parser hf needs a response_template in the checkpoint"):
        choose("tools", "hf", "")
    with pytest.raises(ConfigError, match="--reasoning-parser hf needs a response_template with thinking"):
        choose("reasoning", "hf", "", hints=Hints(response=LISTED))
