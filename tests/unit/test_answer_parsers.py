"""Parsers of answers: recorded forms of every family, fed whole, a character at a time, and cut at every place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagoda.hal.errors import ConfigError
from pagoda.serving.frontend.parsers.answers import AnswerFormat
from pagoda.serving.frontend.parsers.choose import BUILT_IN, choose
from pagoda.serving.frontend.parsers.events import CallArguments, CallName, Content, Context, Event, Reasoning

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "deep": {"type": "object"}}}
TOOLS: dict[str, Any] = {"weather": SCHEMA, "time": {}}
ROME = ("weather", {"city": 'Rome {"]', "days": 2})
OSLO = ("time", {"deep": {"a": [1, {"b": "}"}]}, "flag": True})
BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
EMPTY: tuple[str, dict[str, Any]] = ("time", {})


class Said(NamedTuple):
    content: str
    calls: list[tuple[str, str]]
    reasoning: str = ""


class Case(NamedTuple):
    family: str
    text: str
    content: str = ""
    calls: tuple[tuple[str, Any], ...] = ()
    reasoning: str = ""


def obj(call: tuple[str, Any], key: str = "arguments") -> str:
    return json.dumps({"name": call[0], key: call[1]})


def deepseek(call: tuple[str, Any]) -> str:
    return f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{call[0]}\n```json\n{json.dumps(call[1])}\n```<｜tool▁call▁end｜>"


def deepseek31(call: tuple[str, Any]) -> str:
    return f"<｜tool▁call▁begin｜>{call[0]}<｜tool▁sep｜>{json.dumps(call[1])}<｜tool▁call▁end｜>"


def spelled(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def tags(call: tuple[str, Any], function: str, function_end: str, parameter: str, parameter_end: str, named: str = ">") -> str:
    parts = [
        f"{parameter}{key}{named}{value if isinstance(value, str) else json.dumps(value)}{parameter_end}" for key, value in call[1].items()
    ]
    return "\n".join([f"{function}{call[0]}{named}", *parts, function_end])


def invoke(call: tuple[str, Any]) -> str:
    return tags(call, '<invoke name="', "</invoke>", '<parameter name="', "</parameter>", '">')


def dsml(call: tuple[str, Any]) -> str:
    parts = [
        f'<｜DSML｜parameter name="{key}" string="{json.dumps(isinstance(value, str))}">{spelled(value)}</｜DSML｜parameter>'
        for key, value in call[1].items()
    ]
    return "\n".join([f'<｜DSML｜invoke name="{call[0]}">', *parts, "</｜DSML｜invoke>"])


def step3(call: tuple[str, Any]) -> str:
    text = tags(call, '<steptml:invoke name="', "</steptml:invoke>", '<steptml:parameter name="', "</steptml:parameter>", '">')
    return f"<｜tool_call_begin｜>function<｜tool_sep｜>{text}<｜tool_call_end｜>"


def glm(call: tuple[str, Any]) -> str:
    parts = [f"<arg_key>{key}</arg_key>\n<arg_value>{spelled(value)}</arg_value>" for key, value in call[1].items()]
    return "\n".join([f"<tool_call>{call[0]}", *parts, "</tool_call>"])


def kimi(call: tuple[str, Any], index: int) -> str:
    return f"<|tool_call_begin|>functions.{call[0]}:{index}<|tool_call_argument_begin|>{json.dumps(call[1])}<|tool_call_end|>"


def harmony(call: tuple[str, Any]) -> str:
    return f"<|channel|>commentary to=functions.{call[0]} <|constrain|>json<|message|>{json.dumps(call[1])}<|call|>"


def cohere(call: tuple[str, Any]) -> str:
    return json.dumps({"tool_call_id": "0", "tool_name": call[0], "parameters": call[1]})


TOOL_CASES = {
    "seed": Case(
        "seed_oss",
        f"<seed:tool_call>\n{tags(ROME, '<function=', '</function>', '<parameter=', '</parameter>')}\n</seed:tool_call>",
        "",
        (ROME,),
    ),
    "minimax": Case("minimax_m2", f"Hm.\n<minimax:tool_call>\n{invoke(ROME)}\n{invoke(EMPTY)}\n</minimax:tool_call>", "Hm.", (ROME, EMPTY)),
    "deepseek 3.2": Case(
        "deepseek_v32", f"Hm.\n\n<｜DSML｜function_calls>\n{dsml(ROME)}\n{dsml(OSLO)}\n</｜DSML｜function_calls>", "Hm.", (ROME, OSLO)
    ),
    "step3": Case("step3", f"<｜tool_calls_begin｜>\n{step3(ROME)}\n{step3(EMPTY)}\n<｜tool_calls_end｜>", "", (ROME, EMPTY)),
    "step3 none": Case("step3", "<｜tool_calls_begin｜> none", "<｜tool_calls_begin｜> none"),
    "glm": Case("glm45", f"Hm.\n{glm(ROME)}\n{glm(EMPTY)}", "Hm.", (ROME, EMPTY)),
    "glm in a row": Case(
        "glm47", "<tool_call>weather<arg_key>days</arg_key><arg_value>2</arg_value></tool_call>", "", (("weather", {"days": 2}),)
    ),
    "glm prose": Case("glm45", "<tool_call>not a call</tool_call>", "<tool_call>not a call</tool_call>"),
    "kimi": Case(
        "kimi_k2", f"Hm.<|tool_calls_section_begin|>{kimi(ROME, 0)}{kimi(OSLO, 1)}<|tool_calls_section_end|>", "Hm.", (ROME, OSLO)
    ),
    "harmony": Case("openai", f"Hm.{harmony(ROME)}{harmony(EMPTY)}", "Hm.", (ROME, EMPTY)),
    "harmony none": Case("openai", "<|channel|>final<|message|>x", "<|channel|>final<|message|>x"),
    "cohere": Case("cohere_command3", f"<|START_ACTION|>[\n    {cohere(ROME)},\n    {cohere(OSLO)}\n]<|END_ACTION|>", "", (ROME, OSLO)),
    "internlm": Case("internlm", f"Hm.<|action_start|><|plugin|>\n{obj(ROME, 'parameters')}<|action_end|>\n", "Hm.", (ROME,)),
    "longcat": Case("longcat", f"<longcat_tool_call>{obj(ROME)}</longcat_tool_call>", "", (ROME,)),
    "nemotron": Case("nemotron_nano", f"<TOOLCALL>[{obj(ROME)}, {obj(OSLO)}]</TOOLCALL>", "", (ROME, OSLO)),
    "jamba": Case("jamba", f"<tool_calls>[\n{obj(ROME)},\n{obj(OSLO)}\n]</tool_calls>", "", (ROME, OSLO)),
    "xlam": Case("xlam", f"[{obj(ROME)}, {obj(OSLO)}]", "", (ROME, OSLO)),
    "xlam tag": Case("xlam", f"Hm. <tool_call>{obj(ROME)}</tool_call>", "Hm.", (ROME,)),
    "apertus": Case("apertus", f"Hm.<|tools_prefix|>{json.dumps([dict([ROME]), dict([EMPTY])])}<|tools_suffix|>", "Hm.", (ROME, EMPTY)),
    "apertus data": Case("apertus", "<|tools_prefix|>[1]<|tools_suffix|>", "<|tools_prefix|>[1]<|tools_suffix|>"),
    "lfm2": Case("lfm2", "Hm. <|tool_call_start|>[weather(city='Rome {\"]', days=2)]<|tool_call_end|>", "Hm.", (ROME,)),
    "olmo3": Case("olmo3", "Hm.\n<function_calls>\nweather(city='Rome {\"]', days=2)\ntime()\n</function_calls>", "Hm.", (ROME, EMPTY)),
    "function gemma": Case(
        "functiongemma",
        '<start_function_call>call:weather{city:<escape>Rome {"]<escape>,days:2}<end_function_call>'
        "<start_function_call>call:time{deep:{a:[1,{b:<escape>}<escape>}]},flag:True}<end_function_call>",
        "",
        (ROME, OSLO),
    ),
    "gemma 4": Case("gemma4", 'Hm.<|tool_call>call:weather{city:<|"|>Rome {"]<|"|>,days:2}<tool_call|>', "Hm.", (ROME,)),
    "gemma 4 broken": Case("gemma4", "<|tool_call>call:weather{city<tool_call|>", "<|tool_call>call:weather{city<tool_call|>"),
    "hermes one": Case("hermes", f"<tool_call>\n{obj(ROME)}\n</tool_call>", "", (ROME,)),
    "hermes prose": Case("hermes", f"I look. <b>\n\n<tool_call>\n{obj(ROME)}\n</tool_call>\n", "I look. <b>", (ROME,)),
    "hermes two": Case("hermes", f"<tool_call>{obj(ROME)}</tool_call>\n<tool_call>{obj(OSLO)}</tool_call>", "", (ROME, OSLO)),
    "hermes after": Case("hermes", f"<tool_call>{obj(ROME)}</tool_call> Done.", " Done.", (ROME,)),
    "hermes none": Case("hermes", "a < b, <tool_cal and <tool_call", "a < b, <tool_cal and <tool_call"),
    "hermes spaces": Case("hermes", "a \n b \n", "a \n b \n"),
    "hermes broken": Case("hermes", 'x <tool_call>{"nam": oops</tool_call> y', 'x <tool_call>{"nam": oops</tool_call> y'),
    "hermes no call": Case("hermes", "<tool_call>why</tool_call>", "<tool_call>why</tool_call>"),
    "hermes cut name": Case("hermes", '<tool_call>{"name": "wea', '<tool_call>{"name": "wea'),
    "hermes cut end": Case("hermes", f"<tool_call>{obj(ROME)}", "", (ROME,)),
    "hermes no end": Case("hermes", f"<tool_call>{obj(ROME)}\n<tool_call>{obj(OSLO)}", "", (ROME, OSLO)),
    "hermes no arguments": Case("hermes", '<tool_call>{"name": "time"}</tool_call>', "", (EMPTY,)),
    "hermes null": Case("hermes", '<tool_call>{"name": "time", "arguments": null}</tool_call>', "", (EMPTY,)),
    "hermes text arguments": Case("hermes", f"<tool_call>{obj(('weather', json.dumps(ROME[1])))}</tool_call>", "", (ROME,)),
    "hermes backwards": Case(
        "hermes", f'<tool_call>{{"arguments": {json.dumps(OSLO[1])}, "id": 3, "name": "time"}}</tool_call>', "", (OSLO,)
    ),
    "hermes unknown name": Case("hermes", f"<tool_call>{obj(('other', {}))}</tool_call>", "", (("other", {}),)),
    "hermes garbage at the end": Case("hermes", f"<tool_call>{obj(ROME)}}}}}</tool_call>ok", "ok", (ROME,)),
    "coder": Case(
        "qwen3_coder",
        'Go.\n<tool_call>\n<function=weather>\n<parameter=city>\nRome {"]\n</parameter>\n<parameter=days>\n2\n</parameter>\n'
        "</function>\n</tool_call>\n<tool_call>\n<function=time>\n</function>\n</tool_call>",
        "Go.",
        (ROME, EMPTY),
    ),
    "coder none": Case("qwen3_coder", "<tool_call> <fun", "<tool_call> <fun"),
    "llama": Case("llama3_json", obj(ROME, "parameters"), "", (ROME,)),
    "llama two": Case("llama3_json", f"{obj(ROME, 'parameters')}; {obj(OSLO, 'parameters')}", "", (ROME, OSLO)),
    "llama tag": Case("llama3_json", f"<|python_tag|>{obj(ROME, 'parameters')}", "", (ROME,)),
    "llama typed": Case("llama3_json", f'{{"type": "function", "name": "time", "parameters": {json.dumps(OSLO[1])}}}', "", (OSLO,)),
    "llama data": Case("llama3_json", '{"name": "Bob", "age": 3}\n', '{"name": "Bob", "age": 3}\n'),
    "llama other data": Case("llama3_json", ' {"age": 3, "name": "time"}', ' {"age": 3, "name": "time"}'),
    "llama code": Case("llama3_json", "<|python_tag|>print(1)", "<|python_tag|>print(1)"),
    "llama prose": Case("llama3_json", "It is { warm }.", "It is { warm }."),
    "json list": Case("json", f"[{obj(ROME)}, {obj(OSLO)}]", "", (ROME, OSLO)),
    "json data": Case("json", "[1, 2]", "[1, 2]"),
    "pythonic": Case("pythonic", "[weather(city='Rome {\"]', days=2), time(deep={'a': [1, {'b': '}'}]}, flag=true)]", "", (ROME, OSLO)),
    "pythonic none": Case("pythonic", "[time()]\n", "", (EMPTY,)),
    "pythonic prose": Case("pythonic", "[1] says so", "[1] says so"),
    "pythonic unknown": Case("pythonic", "[other(x=1)] yes", "[other(x=1)] yes"),
    "pythonic broken": Case("pythonic", "[time(x=)]", "[time(x=)]"),
    "pythonic positional": Case("pythonic", "[time(1)]", "[time(1)]"),
    "pythonic marks": Case("llama4_pythonic", "Hm. <|python_start|>[time()]<|python_end|>", "Hm.", (EMPTY,)),
    "mistral old": Case("mistral", f"[TOOL_CALLS] [{obj(ROME)}, {obj(OSLO)}]", "", (ROME, OSLO)),
    "mistral new": Case("mistral", f"Hm.[TOOL_CALLS]weather[ARGS]{json.dumps(ROME[1])}", "Hm.", (ROME,)),
    "mistral two": Case(
        "mistral", f"[TOOL_CALLS]weather{json.dumps(ROME[1])}[TOOL_CALLS]time[CALL_ID]abcdefghi[ARGS]{{}}", "", (ROME, EMPTY)
    ),
    "mistral none": Case("mistral", "[TOOL_CALLS] is a mark [TOOL", "[TOOL_CALLS] is a mark [TOOL"),
    "mistral words": Case("mistral", "[TOOL_CALLS] is a {mark}", "[TOOL_CALLS] is a {mark}"),
    "deepseek": Case("deepseek_v3", f"Hm.{BEGIN}{deepseek(ROME)}\n{deepseek(OSLO)}{END}", "Hm.", (ROME, OSLO)),
    "deepseek 3.1": Case("deepseek_v31", f"{BEGIN}{deepseek31(ROME)}{deepseek31(EMPTY)}{END}", "", (ROME, EMPTY)),
    "deepseek none": Case("deepseek_v3", f"{BEGIN} no <｜tool▁call▁begin｜>x", f"{BEGIN} no <｜tool▁call▁begin｜>x"),
    "granite": Case("granite", f"<|tool_call|>[{obj(ROME)}, {obj(OSLO)}]", "", (ROME, OSLO)),
    "granite 20b": Case("granite-20b-fc", f"<function_call> {obj(ROME)}\n<function_call> {obj(OSLO)}", "", (ROME, OSLO)),
    "phi": Case("phi4_mini_json", f"functools[{obj(ROME)}]", "", (ROME,)),
    "phi marks": Case("phi4_mini_json", f"Ok <|tool_call|>[{obj(ROME)},{obj(OSLO)}]<|/tool_call|>", "Ok", (ROME, OSLO)),
    "hermes cut mark": Case("hermes", f"Hm. <tool_call>\n{obj(ROME)}\n</tool_", "Hm.", (ROME,)),
    "hermes cut after words": Case("hermes", f"<tool_call>{obj(ROME)} So.</tool_", "So.", (ROME,)),
    "coder cut mark": Case("qwen3_coder", "<tool_call>\n<function=time>\n</func", "", (EMPTY,)),
    "glm cut mark": Case("glm45", "Hm.\n<tool_call>time\n</tool_", "Hm.", (EMPTY,)),
    "gemma 4 cut mark": Case("gemma4", '<|tool_call>call:weather{city:<|"|>Rome {"]<|"|>,days:2}<tool_ca', "", (ROME,)),
    "deepseek cut mark": Case("deepseek_v3", f"Hm.{BEGIN}{deepseek(ROME).removesuffix('end｜>')}", "Hm.", (ROME,)),
    "deepseek cut row": Case("deepseek_v3", f"{BEGIN}{deepseek(ROME)}<｜tool▁calls", "", (ROME,)),
    "phi word": Case("phi4_mini_json", "Use functools, or functools", "Use functools, or functools"),
}
REASONING_CASES = {
    "think": Case("qwen3", "<think>\nHm <b>.\n</think>\n\nYes </think>", "Yes </think>", reasoning="Hm <b>."),
    "think empty": Case("qwen3", "<think>\n\n</think>\n\nYes\n", "Yes\n"),
    "think none": Case("deepseek_r1", " <b>Yes <think>", " <b>Yes <think>"),
    "think cut": Case("deepseek_r1", "<think>Hm </thi", "", reasoning="Hm </thi"),
    "granite": Case("granite", "Here's my thought process: Hm. Here is my response: Yes", "Yes", reasoning="Hm."),
    "mistral": Case("mistral", "[THINK]Hm.[/THINK]Yes", "Yes", reasoning="Hm."),
    "harmony": Case(
        "openai_gptoss",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes\n <b>.<|return|>",
        "Yes\n <b>.",
        reasoning="Hm.",
    ),
    "harmony alone": Case("openai_gptoss", "<|channel|>final<|message|>Yes", "Yes"),
    "harmony cut": Case("openai_gptoss", "<|channel|>analysis<|message|>Hm", "", reasoning="Hm"),
    "cohere": Case("cohere_command3", "<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|>Yes<|END_RESPONSE|>", "Yes", reasoning="Hm."),
    "cohere answer": Case("cohere_command3", "<|START_RESPONSE|>Yes<|END_RESPONSE|>", "Yes"),
    "hunyuan": Case("hunyuan_a13b", "<think>\nHm.\n</think>\n<answer>\nYes\n</answer>", "Yes", reasoning="Hm."),
    "ernie": Case("ernie45", "<think>\nHm.\n</think>\n\n<response>\nYes\n</response>\n", "Yes", reasoning="Hm."),
    "seed": Case("seed_oss", "<seed:think>Hm.</seed:think>Yes", "Yes", reasoning="Hm."),
    "longcat": Case("longcat", "<longcat_think>\nHm.\n</longcat_think>\nYes", "Yes", reasoning="Hm."),
    "apertus": Case("apertus", "<|inner_prefix|>Hm.<|inner_suffix|>Yes", "Yes", reasoning="Hm."),
    "gemma 4": Case("gemma4", "<|channel>thought\nHm.<channel|>Yes", "Yes", reasoning="Hm."),
}


def format_of(case: Case, kind: str) -> AnswerFormat:
    family = choose(kind, case.family, "")  # type: ignore[arg-type]
    return AnswerFormat(**{kind: family})


def said(form: AnswerFormat, pieces: list[str], prompt_end: str = "", forced: bool = False, mixed: bool = False) -> Said:
    parser = form.parser(Context(TOOLS, prompt_end, forced))
    assert parser is not None
    events = [event for piece in pieces for event in parser.feed(piece)] + parser.finish()
    assert parser.finish() == []
    return joined(events, mixed)


def joined(events: list[Event], mixed: bool = False) -> Said:
    """`mixed`: thoughts may come after an answer's beginning."""
    content, reasoning, calls = "", "", []
    for event in events:
        match event:
            case Content(text):
                content += text
            case Reasoning(text):
                assert mixed or (not content and not calls)
                reasoning += text
            case CallName(index, name):
                assert index == len(calls)
                calls.append((name, ""))
            case CallArguments(index, text):
                assert index == len(calls) - 1
                calls[-1] = (calls[-1][0], calls[-1][1] + text)
    return Said(content, calls, reasoning)


def check_every_cut(form: AnswerFormat, case: Case, prompt_end: str = "") -> None:
    text, whole = case.text, said(form, [case.text], prompt_end)
    assert (whole.content, whole.reasoning) == (case.content, case.reasoning)
    assert [(name, json.loads(arguments)) for name, arguments in whole.calls] == list(case.calls)
    assert said(form, list(text), prompt_end) == whole
    for cut in range(len(text) + 1):
        assert said(form, [text[:cut], text[cut:]], prompt_end) == whole, text[:cut]


@pytest.mark.parametrize("name", TOOL_CASES)
def test_tool_calls_at_every_cut(name: str) -> None:
    case = TOOL_CASES[name]
    check_every_cut(format_of(case, "tools"), case)


@pytest.mark.parametrize("name", REASONING_CASES)
def test_reasoning_at_every_cut(name: str) -> None:
    case = REASONING_CASES[name]
    check_every_cut(format_of(case, "reasoning"), case)


@pytest.mark.parametrize("name", TOOL_CASES)
def test_an_answer_that_ends_anywhere_gives_what_streaming_gave(name: str) -> None:
    case = TOOL_CASES[name]
    form = format_of(case, "tools")
    for end in range(len(case.text)):
        assert said(form, list(case.text[:end])) == said(form, [case.text[:end]])


SLIPS = ("hermes garbage at the end",)
"""What a model writes where the end of a call should be is content until that end comes."""


@pytest.mark.parametrize("name", [name for name, case in TOOL_CASES.items() if case.calls and name not in SLIPS])
def test_an_answer_cut_in_a_mark_after_a_call_shows_nothing_of_it(name: str) -> None:
    case = TOOL_CASES[name]
    form = format_of(case, "tools")
    for end in range(len(case.text)):
        cut = said(form, [case.text[:end]])
        if cut.calls:
            assert case.content.startswith(cut.content), case.text[:end]
            assert [name for name, _ in cut.calls] == [name for name, _ in case.calls][: len(cut.calls)]


@pytest.mark.parametrize("name", [name for name, case in TOOL_CASES.items() if case.calls and not case.content and name not in SLIPS])
def test_a_forced_call_cut_anywhere_shows_nothing_of_it(name: str) -> None:
    case = TOOL_CASES[name]
    form = format_of(case, "tools")
    for end in range(len(case.text) + 1):
        cut = said(form, [case.text[:end]], forced=True)
        assert not cut.content, case.text[:end]
        assert cut == said(form, list(case.text[:end]), forced=True)
    assert cut == said(form, [case.text])


WORDS = [mark for family in BUILT_IN for mark in family.marks] + [
    *('{"name": "time"', ', "arguments": {"a": "x"}', "{", "}", "[", "]", ",", ";", " ", "\n", '"', ":", "time(", "a=1", ")", "x"),
    *("<function=time>", "<parameter=city>", "</parameter>", "</function>", "```json", "functools", "Here is my response:"),
]


@given(words=st.lists(st.sampled_from(WORDS), max_size=12))
def test_any_salad_of_marks_is_read_the_same_however_it_is_cut(words: list[str]) -> None:
    text = "".join(words)
    for family in BUILT_IN:
        form = AnswerFormat(**{family.kind: family})
        whole = said(form, [text], mixed=True)
        assert said(form, list(text), mixed=True) == said(form, words, mixed=True) == whole, family.names
        if not whole.calls and not whole.reasoning and family.kind == "tools":
            assert whole.content == text, family.names


def test_arguments_stream_as_they_come() -> None:
    parser = format_of(TOOL_CASES["hermes one"], "tools").parser(Context(TOOLS))
    assert parser is not None
    assert parser.feed('<tool_call>{"name": "weather", "arguments": {"city": "Ro') == [
        CallName(0, "weather"),
        CallArguments(0, '{"city": "Ro'),
    ]
    assert parser.feed("me") == [CallArguments(0, "me")]


def test_text_that_cannot_be_a_mark_is_not_held() -> None:
    for family in BUILT_IN:
        parser = AnswerFormat(**{family.kind: family}).parser(Context(TOOLS))
        assert parser is not None
        opened = [Content("<think>")] if "minimax_m2_append_think" in family.names else []
        assert parser.feed("Hello there") == [*opened, Content("Hello there")], family.names


def test_the_prompt_may_have_opened_the_reasoning() -> None:
    form = AnswerFormat(reasoning=choose("reasoning", "deepseek_r1", ""))
    case = Case("", "Hm.\n</think>\n\nYes", "Yes", reasoning="Hm.")
    check_every_cut(form, case, "<|assistant|><think>\n")
    check_every_cut(form, case._replace(text=f"<think>{case.text}"), "<think>\n")


def test_reasoning_then_calls() -> None:
    form = AnswerFormat(choose("tools", "hermes", ""), choose("reasoning", "qwen3", ""))
    text = f"<think>\nA <tool_call> helps.\n</think>\n\nLook:\n<tool_call>\n{obj(ROME)}\n</tool_call>"
    check_every_cut(form, Case("", text, "Look:", (ROME,), "A <tool_call> helps."))


def test_channels_of_thoughts_calls_and_answers() -> None:
    form = AnswerFormat(choose("tools", "openai", ""), choose("reasoning", "openai_gptoss", ""))
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    text = f"{thought}<|channel|>commentary<|message|>Look:<|end|><|start|>assistant{harmony(ROME)}"
    check_every_cut(form, Case("", text, "Look:", (ROME,), "Hm."))


def test_tools_are_read_only_where_they_are_offered() -> None:
    assert AnswerFormat(tools=choose("tools", "hermes", "")).parser(Context()) is None


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        ("{{ messages }}", None, None),
        ("{{ tools }}", "json", None),
        ("{{ tools }} <tool_call> <think>", "hermes", "qwen3"),
        ("<tool_call><function=x>", "qwen3_coder", None),
        ("<|python_tag|>", "llama3_json", None),
        ("[TOOL_CALLS] [THINK]", "mistral", "mistral"),
        ("<｜tool▁calls▁begin｜> </think>", "deepseek_v3", "deepseek_r1"),
        ("<|tool_call|> Here is my thought process:", "granite", "granite"),
        ("<|tool_call|><|/tool_call|>", "phi4_mini_json", None),
        ("<tool_call> <arg_key> <think>", "glm45", "glm45"),
        ("<|channel|>analysis", "openai", "openai_gptoss"),
        ("<minimax:tool_call> <think>", "minimax_m2", "minimax_m2"),
        ("<|tool_calls_section_begin|>", "kimi_k2", None),
        ("<seed:tool_call><function= <seed:think>", "seed_oss", "seed_oss"),
        ("<|START_ACTION|> <|START_RESPONSE|>", "cohere_command3", "cohere_command3"),
        ("<tool_calls> <answer>", "hunyuan_a13b", "hunyuan_a13b"),
    ],
)
def test_the_template_chooses(template: str, tools: str | None, reasoning: str | None) -> None:
    for kind, name in (("tools", tools), ("reasoning", reasoning)):
        found = choose(kind, "auto", template)  # type: ignore[arg-type]
        assert (found.names if found else ()) == (choose(kind, name, "").names if name else ())  # type: ignore[arg-type, union-attr]
        assert choose(kind, "none", template) is None  # type: ignore[arg-type]


def test_names_are_unique_and_an_unknown_one_lists_them() -> None:
    for kind in ("tools", "reasoning"):
        names = [name for family in BUILT_IN if family.kind == kind for name in family.names]
        assert len(set(names)) == len(names)
    with pytest.raises(ConfigError, match=r"--tool-call-parser 'hermez' is not here; there is auto, none, .*hermes"):
        choose("tools", "hermez", "")


def test_a_stranger_brings_a_family_and_a_broken_one_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    info = tmp_path / "shouter-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shouter\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[pagoda.parsers]\nshouter = shouter:FAMILY\n")
    (tmp_path / "shouter.py").write_text(STRANGER)
    assert choose("tools", "auto", "CALL! <tool_call>") == choose("tools", "shouter", "")
    check_every_cut(AnswerFormat(choose("tools", "shouter", "")), Case("", f"Hm CALL!{obj(ROME)}", "Hm", (ROME,)))
    (info / "entry_points.txt").write_text("[pagoda.parsers]\nshouter = shouter:marked\n")
    with pytest.raises(ConfigError, match=r"parser plugin 'shouter' \(shouter:marked\) is no Family but function"):
        choose("tools", "auto", "")
    (info / "entry_points.txt").write_text("[pagoda.parsers]\nshouter = shouter:NOTHING\n")
    with pytest.raises(ConfigError, match=r"parser plugin 'shouter' .* failed to load"):
        choose("tools", "auto", "")


STRANGER = """
from pagoda.serving.frontend.parsers.events import Family
from pagoda.serving.frontend.parsers.flow import scripted
from pagoda.serving.frontend.parsers.json_calls import marked
FAMILY = Family("tools", ("shouter",), scripted(marked(("CALL!",))), signs=("CALL!",))
"""
