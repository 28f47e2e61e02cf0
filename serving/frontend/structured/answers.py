"""What one answer of a chat must look like, from the format and the tools that its request asks for: no protocol's words in here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from pagoda.hal.errors import RequestError
from pagoda.serving.engine.structured import StructuredOutputsParams, Thinking
from pagoda.serving.frontend.parsers.answers import AnswerFormat
from pagoda.serving.frontend.parsers.events import CallShape
from pagoda.serving.frontend.structured.schema import read_schema
from pagoda.serving.frontend.structured.tool_calls import Format, OfferedTool, calls_tag
from pagoda.serving.frontend.text import Tokenizer


class ToolRule(NamedTuple):
    """`forced`: the answer must be calls. `parallel`: it may be several. `param`: the request's field, for errors."""

    forced: bool = False
    parallel: bool = True
    param: str = "tool_choice"


def answer_structure(
    wanted: StructuredOutputsParams | None,
    tools: Sequence[OfferedTool],
    rule: ToolRule,
    answers: AnswerFormat,
    tokenizer: Tokenizer,
    prompt_end: str,
) -> StructuredOutputsParams | None:
    """What to ask the engine for; None where anything may come.

    Args:
        wanted: the form of what is said to the reader. tools: those that may be called.
        prompt_end: the prompt's last text, where it may have opened the reasoning.

    Calls are bound when they are forced, when a tool has a schema to keep to, and when the rest of the answer is bound.
    Raises `RequestError` where the model's family of calls has no grammar.
    """
    bound = rule.forced or wanted is not None or any(tool.schema is not None for tool in tools)
    if tools and bound:
        content = None if wanted is None else _content(wanted)
        shape = _shape(answers, tokenizer, rule.param)
        tag = calls_tag(shape, tools, tokenizer, forced=rule.forced, parallel=rule.parallel, content=content, param=rule.param)
        closed = None if wanted is None else wanted.disable_additional_properties
        wanted = StructuredOutputsParams(structural_tag=tag, origin=rule.param, disable_additional_properties=closed)
    return None if wanted is None else replace(wanted, thinking=thinking_of(answers, prompt_end))


def budgeted(
    wanted: StructuredOutputsParams | None, budget: int, answers: AnswerFormat, prompt_end: str, param: str
) -> StructuredOutputsParams | None:
    """`wanted`, after at most so many tokens of reasoning. Raises `RequestError` where that cannot be bounded."""
    family = answers.reasoning
    if family is None or not bounded(answers, wanted):
        why = "a model whose reasoning ends with a mark that the server knows"
        if family is not None and family.counted[1]:
            why = "an answer without a form and without forced or strict calls: this model's reasoning is part of what binds those"
        raise RequestError(f"{param} needs {why}; leave it out", param=param)
    if family.closes:
        thinking = thinking_of(answers, prompt_end)
    else:
        thinking = _thinking(*family.counted, prompt_end)._replace(repeats=True)
    if thinking is None:
        return wanted
    return replace(wanted or StructuredOutputsParams(free=True, origin=param), thinking=thinking._replace(budget=budget))


def bounded(answers: AnswerFormat, wanted: StructuredOutputsParams | None) -> bool:
    """Whether a budget can end this model's reasoning, in an answer of this form."""
    family = answers.reasoning
    return family is not None and bool(family.closes or (family.counted[1] and wanted is None))


def _shape(answers: AnswerFormat, tokenizer: Tokenizer, param: str) -> CallShape:
    family = answers.tools
    for shape in family.shapes if family is not None else ():
        if not shape.needs or len(tokenizer.encode(shape.needs, add_special_tokens=False)) == 1:
            return shape
    name = family.names[0] if family is not None else "none"
    raise RequestError(f"calls of this model cannot be bound by a grammar: its parser is {name}; use auto without strict", param=param)


def _content(wanted: StructuredOutputsParams) -> Format:
    """The format of what is no call."""
    if wanted.kind == "json_object":
        return {"type": "json_schema", "json_schema": {"type": "object"}}
    if wanted.kind == "json":
        return {"type": "json_schema", "json_schema": read_schema(str(wanted.json), wanted.origin)}
    if wanted.kind == "regex":
        return {"type": "regex", "pattern": wanted.regex}
    if wanted.kind == "choice":
        return {"type": "or", "elements": [{"type": "const_string", "value": text} for text in wanted.choice or ()]}
    raise RequestError(
        f"{wanted.kind} is not possible together with tools: say in it how they are called, or leave the tools out", param=wanted.origin
    )


def thinking_of(answers: AnswerFormat, prompt_end: str) -> Thinking | None:
    """What may come first; None where the prompt has ended the reasoning already, or the model has none."""
    family = answers.reasoning
    if family is None or not family.closes or prompt_end.rstrip().endswith(family.closes):
        return None
    return _thinking(family.opens, family.closes, prompt_end)


def _thinking(opens: tuple[str, ...], closes: tuple[str, ...], prompt_end: str) -> Thinking:
    end = prompt_end.rstrip()
    opened = next((place for place, mark in enumerate(opens) if end.endswith(mark.strip())), None)
    return Thinking(opens, closes, opened is not None, opened=opened or 0)
