"""What all families of calls and thoughts must do alike: texts around, several calls, nested values, letters of marks, cut ends."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from call_writers import M3, THOUGHTS, WRITERS, Call
from pagoda.hal.errors import ConfigError
from pagoda.serving.frontend.parsers.answers import AnswerFormat
from pagoda.serving.frontend.parsers.choose import BUILT_IN, choose, families
from pagoda.serving.frontend.parsers.events import CallArguments, CallName, Content, Context, Event, Hints, Reasoning
from pagoda.serving.frontend.parsers.pairs import suffix_in
from pagoda.serving.frontend.parsers.tagged import from_text, types_of, valued

ORDER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "share": {"type": "number"},
        "now": {"type": "boolean"},
        "place": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "numbers": {"type": "array", "items": {"type": "integer"}}},
        },
        "list": {"type": "array", "items": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}},
        "note": {"type": ["string", "null"]},
    },
}
TOOLS: dict[str, Any] = {"order": ORDER, "now": {"type": "object", "properties": {}}}
PLAIN: Call = ("order", {"city": "Rome", "days": 2})
NOTHING: Call = ("now", {})
NESTED: Call = (
    "order",
    {
        "city": 'A "b" \\ {[(',
        "share": 0.5,
        "now": True,
        "place": {"street": "x", "numbers": [1, 2]},
        "list": [{"a": 1, "b": "}]"}, {"a": 2, "b": "é日👍🏽"}],
    },
)
DIGITS: Call = ("order", {"city": "12", "note": "7", "days": 3})
TEXTS = sorted(name for name, writer in WRITERS.items() if writer.texts)


class Said(dict[str, Any]):
    """content, reasoning, and calls as [name, arguments' text]."""


def format_of(tools: str = "none", reasoning: str = "none") -> AnswerFormat:
    return AnswerFormat(choose("tools", tools, ""), choose("reasoning", reasoning, ""))


def said(form: AnswerFormat, pieces: list[str], prompt_end: str = "", forced: bool = False, tools: Any = None) -> Said:
    parser = form.parser(Context(TOOLS if tools is None else tools, prompt_end, forced))
    assert parser is not None
    return joined([event for piece in pieces for event in parser.feed(piece)] + parser.finish())


def joined(events: list[Event]) -> Said:
    out = Said(content="", reasoning="", calls=[])
    for event in events:
        match event:
            case Content(text):
                out["content"] += text
            case Reasoning(text):
                out["reasoning"] += text
            case CallName(index, name):
                assert index == len(out["calls"])
                out["calls"].append([name, ""])
            case CallArguments(index, text):
                assert index == len(out["calls"]) - 1 and text
                out["calls"][-1][1] += text
    return out


def check(form: AnswerFormat, text: str, content: str, calls: tuple[Call, ...], reasoning: str = "", prompt_end: str = "") -> None:
    """That is what is said, whole, a character at a time, and cut at every place."""
    whole = said(form, [text], prompt_end)
    assert [(name, json.loads(arguments)) for name, arguments in whole["calls"]] == list(calls)
    assert (whole["content"], whole["reasoning"]) == (content, reasoning)
    assert said(form, list(text), prompt_end) == whole
    for cut in range(len(text) + 1):
        assert said(form, [text[:cut], text[cut:]], prompt_end) == whole, text[:cut]


def letters(name: str) -> Call:
    """A text of the letters of this family's marks, none of them whole; but whole where arguments are JSON."""
    family = choose("tools", name, "")
    assert family is not None
    marks = [mark for mark in family.marks if mark.strip()] or ["<tool_call>"]
    if WRITERS[name].texts or name in ("gemma4", "functiongemma"):
        return "order", {
            "city": " ".join([*(mark.strip()[:-1] for mark in marks), *(mark.strip()[1:] for mark in marks), "</param <|open"])
        }
    return "order", {"city": " ".join(marks)}


def test_every_family_of_calls_behind_a_text_has_a_writer() -> None:
    bare = {"llama3_json", "json", "xlam", "pythonic", "hf"}
    for family in families("tools"):
        assert bare & set(family.names) or set(WRITERS) & set(family.names), family.names


@pytest.mark.parametrize("name", WRITERS)
def test_calls_between_texts(name: str) -> None:
    writer = WRITERS[name]
    form = format_of(name)
    check(form, writer.write([PLAIN]), "", (PLAIN,))
    check(form, writer.write([NOTHING, PLAIN, NOTHING]), "", (NOTHING, PLAIN, NOTHING))
    check(form, f"Look: a < b.\n{writer.write([PLAIN])}", "Look: a < b.", (PLAIN,))
    behind = said(form, [f"{writer.write([PLAIN])}Done."])
    assert (behind["content"].strip(), len(behind["calls"])) == ("Done.", 1)
    assert said(form, list(f"{writer.write([PLAIN])}Done.")) == behind
    check(form, "Nothing to call: {}, <b> [1] a|b", "Nothing to call: {}, <b> [1] a|b", ())


@pytest.mark.parametrize("name", WRITERS)
def test_nested_values_and_digits_that_are_text(name: str) -> None:
    form = format_of(name)
    check(form, WRITERS[name].write([NESTED, DIGITS]), "", (NESTED, DIGITS))


@pytest.mark.parametrize("name", WRITERS)
def test_letters_of_marks_in_values(name: str) -> None:
    call = letters(name)
    check(format_of(name), WRITERS[name].write([call, PLAIN]), "", (call, PLAIN))


@pytest.mark.parametrize("name", WRITERS)
def test_an_answer_that_ends_anywhere(name: str) -> None:
    """Streamed it says the same, and once a call is told, nothing of a mark or of half a call is content."""
    form, text = format_of(name), f"Hm.\n{WRITERS[name].write([PLAIN, NESTED])}"
    for end in range(len(text)):
        whole = said(form, [text[:end]])
        assert said(form, list(text[:end])) == whole
        if whole["calls"]:
            assert whole["content"] == "Hm." and whole["calls"][0][0] == "order", text[:end]
        assert len(whole["calls"]) <= 2
    text = WRITERS[name].write([PLAIN])
    for end in range(len(text)):
        forced = said(form, [text[:end]], forced=True)
        assert not forced["content"].strip(), text[:end]
        assert said(form, list(text[:end]), forced=True) == forced


@pytest.mark.parametrize("name", WRITERS)
def test_arguments_that_do_not_fit(name: str) -> None:
    """Nothing is lost and nothing fails: what is no number stays a text, what is no JSON goes on as it stands, or the answer is a text."""
    form = format_of(name)
    good = WRITERS[name].write([("order", {"days": 77})])
    bad = good.replace("77", "many {")
    whole = said(form, [bad])
    assert said(form, list(bad)) == whole
    if WRITERS[name].texts:
        assert [(call, json.loads(arguments)) for call, arguments in whole["calls"]] == [("order", {"days": "many {"})]
    else:
        assert "many" in whole["content"] + "".join(arguments for _, arguments in whole["calls"])
    empty = said(form, list(WRITERS[name].write([PLAIN]).replace("order", "")))
    assert not [call for call, _ in empty["calls"] if not call]


@pytest.mark.parametrize("name", WRITERS)
def test_a_name_comes_before_its_arguments(name: str) -> None:
    text = WRITERS[name].write([PLAIN])
    parser = format_of(name).parser(Context(TOOLS))
    assert parser is not None
    named = None
    for at, char in enumerate(text):
        for event in parser.feed(char):
            if isinstance(event, CallName):
                named = at
            assert not isinstance(event, CallArguments) or named is not None
    assert named is not None and named < len(text)


@pytest.mark.heavy
@pytest.mark.parametrize("name", WRITERS)
def test_every_cut_into_three(name: str) -> None:
    form, text = format_of(name), f"Hm.\n{WRITERS[name].write([PLAIN])}"
    whole = said(form, [text])
    assert len(whole["calls"]) == 1
    for first in range(len(text)):
        for second in range(first + 1, len(text)):
            assert said(form, [text[:first], text[first:second], text[second:]]) == whole, (text[:first], text[first:second])


@pytest.mark.parametrize("name", THOUGHTS)
def test_thoughts_then_an_answer(name: str) -> None:
    begin, end = THOUGHTS[name]
    form = format_of(reasoning=name)
    check(form, f"{begin}\nHm <b>, {end[:-1]}.\n{end}\n\nYes.", "Yes.", (), f"Hm <b>, {end[:-1]}.")
    check(form, f"{begin}Hm.", "", (), "Hm.")
    check(form, f"Yes {begin}no{end}", f"Yes {begin}no{end}", ())
    check(form, f"Hm.{end}Yes.", "Yes.", (), "Hm.", prompt_end=f"<assistant>{begin}")
    text = f"{begin}Hm, so.{end}Yes."
    whole = said(form, [text])
    for first in range(len(text)):
        for second in range(first + 1, len(text)):
            assert said(form, [text[:first], text[first:second], text[second:]]) == whole


@pytest.mark.parametrize("name", sorted({*WRITERS, "hy_v4", "ling3", "poolside_v1"} & set(THOUGHTS)))
def test_thoughts_then_calls(name: str) -> None:
    begin, end = THOUGHTS[name]
    form = format_of(name, name)
    check(form, f"{begin}Hm.{end}Look:\n{WRITERS[name].write([PLAIN, NESTED])}", "Look:", (PLAIN, NESTED), "Hm.")


@pytest.mark.parametrize("name", ["deepseek_v4", "deepseek_v41", "kimi_k2", "kimi_k3", "k2_horizon", "minimax_m3", "plamo3"])
def test_calls_end_thoughts_that_nothing_has_ended(name: str) -> None:
    check(format_of(name, name), f"{THOUGHTS[name][0]}Hm.{WRITERS[name].write([PLAIN])}", "", (PLAIN,), "Hm.")


def test_channels_of_kimi_k3() -> None:
    form = format_of("kimi_k3", "kimi_k3")
    response, done = ("<|open|>response<|sep|>", "<|close|>response<|sep|>"), "<|close|>message<|sep|>"
    calls = WRITERS["kimi_k3"].write([PLAIN, NESTED])
    thought = "<|open|>think<|sep|>Hm.<|close|>think<|sep|>"
    check(form, f"{thought}{response[0]}Look:{response[1]}{calls}{done}", "Look:", (PLAIN, NESTED), "Hm.")
    check(form, f"Yes.{response[1]}{done}", "Yes.", (), prompt_end=response[0])
    check(form, f"{thought}{response[0]}Yes.", "Yes.", (), "Hm.")
    whole = (
        '<|open|>tools<|sep|><|open|>call tool="order" index="1"<|sep|><|open|>json type="object"<|sep|>{"days": [2]}<|close|>json<|sep|>'
    )
    check(form, f"{whole}<|close|>call<|sep|><|close|>tools<|sep|>", "", (("order", {"days": [2]}),))
    quoted = WRITERS["kimi_k3"].write([("order", {"a&quot;b&amp;c": 1})])
    check(form, quoted, "", (("order", {'a"b&c': 1}),))


def test_messages_of_muse() -> None:
    form = format_of("muse_glimmer", "muse")
    parameter = '<atem:parameter name="days">2</atem:parameter>'
    call = f'<atem:function_calls>\n<atem:invoke name="order.order">\n{parameter}\n</atem:invoke>\n</atem:function_calls>'
    echoed, turn = f"A call is {call}.", "<|start|>assistant"
    called = f" to=self<|message|>{echoed}<|eom|>{turn} to=order.order<|message|>{call}<|eom|>"
    text = f"{called}{turn} to=user<|message|>{echoed}<|eot|>"
    check(form, text, echoed, (("order", {"days": 2}),), echoed)
    check(form, f"<|start|>assistant{text}", echoed, (("order", {"days": 2}),), echoed)
    twice = " to=self<|message|>A.<|eom|><|start|>assistant to=self<|message|>B.<|eom|><|start|>assistant<|message|>Yes"
    check(form, twice, "Yes", (), "A.\nB.")
    check(form, "Hm.<|eom|><|start|>assistant to=user<|message|>Yes", "Yes", (), "Hm.", prompt_end="<|start|>assistant to=self<|message|>")
    check(form, " to=user is a word", " to=user is a word", ())
    alone = format_of(reasoning="muse_glimmer")
    assert said(alone, [f" to=order<|message|>{call}<|eom|>"], tools={})["content"] == call


@pytest.mark.parametrize("name", ["openai", "muse_glimmer", "inkling"])
def test_arguments_stream_through_both_parsers(name: str) -> None:
    head = {"openai": "", "muse_glimmer": " to=order", "inkling": ""}[name]
    text = head + WRITERS[name].write([("order", {"city": "Rome", "place": {"street": "x" * 30}})])
    parser = format_of(name, "gpt_oss" if name == "openai" else name).parser(Context(TOOLS))
    assert parser is not None
    told = [sum(isinstance(event, CallArguments) for event in parser.feed(char)) for char in text]
    assert sum(map(bool, told)) > 1 and any(told[: text.index("xxx")])


def test_blocks_of_inkling() -> None:
    form = format_of("inkling", "inkling")
    invoke = '<|message_model|>order<|content_invoke_tool_json|>{"name":"order","args":{"days": 2}}<|end_message|>'
    text = f"<|content_thinking|>Hm.\n<|end_message|><|message_model|><|content_text|>Look:<|end_message|>{invoke}"
    check(form, text, "Look:", (("order", {"days": 2}),), "Hm.", prompt_end="<|message_model|>")
    check(form, f"<|message_model|>{text}", "Look:", (("order", {"days": 2}),), "Hm.")
    check(form, "Hm.<|end_message|><|message_model|><|content_text|>Yes<|content_model_end_sampling|>", "Yes", (), "Hm.",
          prompt_end="<|content_thinking|>")  # fmt: skip
    check(form, "Yes", "Yes", ())


def test_forms_of_k2_horizon() -> None:
    form = format_of("k2_horizon")
    as_json = '<ifm|tool_calls><ifm|tool_call>{"name": "order", "arguments": {"days": 2}}</ifm|tool_call>\n</ifm|tool_calls>'
    check(form, f"Hm.{as_json}So.", "Hm.So.", (("order", {"days": 2}),))
    typed = (
        "<ifm|tool_call>now<ifm|arg_key>n</ifm|arg_key><ifm|arg_type>KIND</ifm|arg_type><ifm|arg_value>5</ifm|arg_value></ifm|tool_call>"
    )
    for kind, value in (("integer", 5), ("string", "5"), ("array[any]", 5), ("any", 5)):
        check(form, f"<ifm|tool_calls>{typed.replace('KIND', kind)}</ifm|tool_calls>", "", (("now", {"n": value}),))
    for begin, end in (("<ifm|think>", "</ifm|think>"), ("<ifm|think_faster>", "</ifm|think_faster>")):
        check(format_of(reasoning="k2_horizon"), f"{begin}Hm.{end}Yes", "Yes", (), "Hm.")


def test_forms_of_minicpm5() -> None:
    form = format_of("minicpm5")
    check(form, "<functionname='order'><paramname=\"city\"> a </param></function>", "", (("order", {"city": "a"}),))
    inner = '<function name="order" id="1"><arguments><param name="city"><![CDATA[</param> b ]]></param></arguments></function>'
    check(form, f"Hm.\n{inner}", "Hm.", (("order", {"city": "</param> b "}),))
    check(form, "a <function of x> and <functional>", "a <function of x> and <functional>", ())


def test_forms_of_gigachat() -> None:
    form = format_of("gigachat3")
    call = '{"name": "order", "arguments": {"days": 2}}'
    for before in ("<|function_call|>", "function call<|role_sep|>\n", "<|message_sep|>\n\nfunction call<|role_sep|>\n"):
        check(form, f"Hm.{before}{call}</s>", "Hm.", (("order", {"days": 2}),))
        check(form, f"Hm.{before}{call}<|message_sep|>\n\n", "Hm.", (("order", {"days": 2}),))


def test_json_where_tags_are_usual() -> None:
    for name, start, end in (("mimo", "<tool_call>", "</tool_call>"), ("dots", "<dots_function_call>", "</dots_function_call>")):
        text = f'Hm.\n{start}\n{{"name": "order", "arguments": {{"days": 2}}}}\n{end}{WRITERS[name].write([PLAIN])}'
        check(format_of(name), text, "Hm.", (("order", {"days": 2}), PLAIN))


def test_elements_of_minimax_m3() -> None:
    form = format_of("minimax_m3")

    def call(body: str) -> str:
        return f'{M3}<tool_call>{M3}<invoke name="order">{body}{M3}</invoke>{M3}</tool_call>'

    def element(name: str, text: str) -> str:
        return f"{M3}<{name}>{text}{M3}</{name}>"

    check(form, call(element("place", '{"street": "x"}')), "", (("order", {"place": {"street": "x"}}),))
    other = element("other", element("a", "1") + element("b", element("item", "2") + element("item", "3")))
    check(form, call(other), "", (("order", {"other": {"a": "1", "b": ["2", "3"]}}),))
    mixed = element("other", "t" + element("a", "1"))
    check(form, call(mixed), "", (("order", {"other": {"a": "1", "$text": "t"}}),))
    check(form, call(element("days", "2") + "slip"), "", (("order", {"days": 2}),))


def test_the_marks_that_a_prompt_may_not_have_opened() -> None:
    form = format_of(reasoning="minimax_m2_append_think")
    check(form, "Hm.</think>Yes.", "<think>Hm.</think>Yes.", ())
    check(form, "<think>Hm.</think>Yes.", "<think>Hm.</think>Yes.", ())
    check(form, "", "", ())


def test_a_suffix_of_hunyuans_tags() -> None:
    words = ["<|bos|>", "<think:a+b>", "</think:a+b>", "<tool_calls:a+b>"]
    assert suffix_in(words) == ":a+b" and suffix_in(["<think>", "<x:y>"]) == ""
    for name in ("hy_v3", "hy_v4"):
        form = AnswerFormat(choose("tools", name, "", hints=Hints(words)), choose("reasoning", name, "", hints=Hints(words)))
        text = WRITERS[name].write([PLAIN, NESTED])
        for tag in ("tool_calls", "tool_call", "tool_sep", "arg_key", "arg_value"):
            text = text.replace(f"{tag}>", f"{tag}:a+b>")
        check(form, f"<think:a+b>Hm.</think:a+b>Look:{text}", "Look:", (PLAIN, NESTED), "Hm.")


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        ("<｜DSML｜tool_calls> <think>", "deepseek_v4", "deepseek_v4"),
        ("<｜DSML｜ calls> <think>", "deepseek_v41", "deepseek_v41"),
        ("<｜DSML｜function_calls> <think>", "deepseek_v32", "deepseek_r1"),
        ("'<|open|>' + tag", "kimi_k3", "kimi_k3"),
        ("<ifm|tool_calls> <ifm|think>", "k2_horizon", "k2_horizon"),
        ("{% set ns = ']<]minimax[>[' %}<mm:think>", "minimax_m3", "minimax_m3"),
        ('<function name="x"><param name="k">', "minicpm5", None),
        ("<|plamo:begin_tool_requests:plamo|> <|plamo:begin_think:plamo|>", "plamo3", "plamo3"),
        ("<|start|>assistant to=self <atem:function_calls> <think>", "muse_glimmer", "muse"),
        ("<|content_invoke_tool_json|> <|content_thinking|>", "inkling", "inkling"),
        ("'<|role_sep|>'", "gigachat3", None),
        ("'<tool_calls' + s + '>' <tool_sep <arg_key <think", "hy_v3", "hy_v4"),
        ("'<tool_calls' + s + '>' <arg_key <think", "hy_v4", "hy_v4"),
        ("<tool_call> <arg_key> <think>", "ling3", "ling3"),
        ("<dots_function_call> <tool_call>", "dots", None),
        ("<|START_ACTION|> <|START_TEXT|> <|START_RESPONSE|>", "cohere_command4", "cohere_command4"),
        ("<|tool_calls_section_begin|> <think>", "kimi_k2", "kimi_k2"),
    ],
)
def test_the_template_chooses(template: str, tools: str, reasoning: str | None) -> None:
    for kind, name in (("tools", tools), ("reasoning", reasoning)):
        found = choose(kind, "auto", template)  # type: ignore[arg-type]
        wanted = choose(kind, name, "") if name else None  # type: ignore[arg-type]
        assert (found.names if found else ()) == (wanted.names if wanted else ())


def test_an_unknown_name_lists_all() -> None:
    with pytest.raises(ConfigError, match=r"--reasoning-parser 'qwen9' is not here; there is auto, none, .*kimi_k3.*muse_glimmer") as told:
        choose("reasoning", "qwen9", "")
    assert all(name in str(told.value) for family in families("reasoning") for name in family.names)


def test_types_that_a_schema_allows() -> None:
    root = {"$defs": {"P": {"type": "object"}, "Loop": {"$ref": "#/$defs/Loop"}}}
    assert types_of({"$ref": "#/$defs/P"}, root) == {"object"}
    assert types_of({"$ref": "#/$defs/Loop"}, root) == types_of(None, root) == types_of({}, root) == {"string"}
    assert types_of({"anyOf": [{"type": "integer"}, {"$ref": "#/$defs/P"}]}, root) == {"integer", "object"}
    assert types_of({"enum": [1, "a"]}, root) == {"integer", "number", "string"}
    assert valued("7", {"string", "null"}) == "7" and valued("null", {"string", "null"}) is None
    assert valued("[1]", {"string", "array"}) == [1] and valued("7.5", {"integer", "string"}) == "7.5"
    assert valued("True", {"boolean"}) is True and valued("Abc", {"integer"}) == "Abc" and valued("7", {"any"}) == 7
    assert [from_text(text) for text in ("NaN", "Infinity", "{'A': True}", '{"A": 1}', "None")] == [
        "NaN", "Infinity", "{'A': True}", {"A": 1}, None,
    ]  # fmt: skip


def test_any_cut_of_a_long_answer_with_many_calls() -> None:
    dice = random.Random(7)
    for name in WRITERS:
        form = format_of(name)
        text = f"Hm.\n{WRITERS[name].write([PLAIN, NESTED, NOTHING, DIGITS, letters(name)])}"
        whole = said(form, [text])
        for _ in range(20):
            cuts = sorted(dice.choices(range(len(text)), k=dice.randrange(2, 9)))
            assert said(form, [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]) == whole


def test_every_name_belongs_to_one_family() -> None:
    for kind in ("tools", "reasoning"):
        names = [name for family in BUILT_IN if family.kind == kind for name in family.names]
        assert len(names) == len(set(names))


def test_the_guide_names_every_parser() -> None:
    guide = (Path(__file__).parents[2] / "docs/guide/server.md").read_text(encoding="utf-8")
    assert not [name for kind in ("tools", "reasoning") for family in families(kind) for name in family.names if f"`{name}`" not in guide]
