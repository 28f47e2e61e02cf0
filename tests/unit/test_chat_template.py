"""Chat templates against transformers' own rendering, and what a template's error tells the client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from frontend_samples import byte_level
from pagoda.hal.errors import RequestError
from pagoda.serving.frontend.chat_messages import ContentFormat
from pagoda.serving.frontend.chat_template import ChatTemplate
from transformers import PreTrainedTokenizerFast

FOLDER = Path(__file__).parent.parent / "samples" / "chat_templates"
SOURCES = {path.stem: path.read_text() for path in sorted(FOLDER.glob("*.jinja"))}
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {"città": {"type": "string"}}}}}
CALL = {"id": "call_001", "type": "function", "function": {"name": "weather", "arguments": {"città": "Zürich <b>", "days": [1, 2.5]}}}
USER = {"role": "user", "content": "  What's the weather <here> & now?\n"}
SYSTEM = {"role": "system", "content": "Be brief. 日本語 🎉"}
ANSWER = {"role": "assistant", "content": "Sunny.  "}
CHATS: dict[str, list[dict[str, Any]]] = {
    "user": [USER],
    "system": [SYSTEM, USER],
    "turns": [SYSTEM, USER, ANSWER, USER],
    "reasoning": [USER, {"role": "assistant", "content": "Sunny", "reasoning": "I looked out."}],
    "thought": [USER, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nSunny"}, USER],
    "tool": [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "21", "tool_call_id": "call_001"},
    ],
}


def oracle() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=byte_level(), **SPECIAL)


def render(source: str, chat: list[dict[str, Any]], **options: Any) -> str:
    return ChatTemplate({"default": source}, SPECIAL).render(chat, **options)


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", sorted(set(SOURCES) - {"parts_only"}))
@pytest.mark.parametrize("options", [{}, {"enable_thinking": False}, {"date_string": "1 Jan 2026"}], ids=["", "thinking", "date"])
@pytest.mark.parametrize("tools", [None, [TOOL]], ids=["", "tools"])
def test_rendering_equals_transformers(name: str, chat: str, options: dict[str, Any], tools: list[dict[str, Any]] | None) -> None:
    messages = CHATS[chat]
    if chat == "tool" and name == "chatml":
        messages = [{**m, "content": m["content"] or ""} for m in messages]  # transformers stumbles over a null there
    expected = oracle().apply_chat_template(
        messages, tools=tools, chat_template=SOURCES[name], tokenize=False, add_generation_prompt=True, **options
    )
    assert render(SOURCES[name], CHATS[chat], tools=tools, variables=options) == expected


@pytest.mark.parametrize("name", ["chatml", "dated_header", "parts_or_string", "tools_and_reasoning"])
@pytest.mark.parametrize("content", ["Sunny", "Sunny and  ", [{"type": "text", "text": "Sun"}]], ids=["plain", "spaced", "parts"])
def test_continuing_the_last_message_equals_transformers(name: str, content: Any) -> None:
    joined = "Sun" if isinstance(content, list) and name != "parts_or_string" else content
    chat = [USER, {"role": "assistant", "content": joined}]
    expected = oracle().apply_chat_template(
        chat, chat_template=SOURCES[name], tokenize=False, continue_final_message=True, date_string="x", add_generation_prompt=False
    )
    ours = [USER, {"role": "assistant", "content": content}]
    given = {"add_generation_prompt": False, "continue_final_message": True, "variables": {"date_string": "x"}}
    assert render(SOURCES[name], ours, **given) == expected


def test_parts_reach_a_template_that_loops_over_them_and_strings_become_parts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    expected = oracle().apply_chat_template([{"role": "user", "content": parts}], chat_template=SOURCES["parts_only"], tokenize=False)
    assert render(SOURCES["parts_only"], [{"role": "user", "content": parts}], add_generation_prompt=False) == expected
    assert render(SOURCES["parts_only"], [{"role": "user", "content": "a"}]) == "User: a<end_of_utterance>\nAssistant:"
    assert "\na\nb<|im_end|>" in render(SOURCES["chatml"], [{"role": "user", "content": parts}])


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("chatml", ContentFormat(parts=False, strings=True)),
        ("dated_header", ContentFormat(parts=False, strings=True)),
        ("parts_only", ContentFormat(parts=True, strings=False)),
        ("parts_or_string", ContentFormat(parts=True, strings=True)),
    ],
)
def test_the_content_format_is_read_off_the_template(name: str, form: ContentFormat) -> None:
    assert ChatTemplate({}).content_format(SOURCES[name]) == form


def test_null_content_stays_for_templates_that_ask_for_it() -> None:
    source = "{% for m in messages %}{{ 'none' if m['content'] is none else m.content }}{% endfor %}"
    assert render(source, [{"role": "assistant", "content": None, "tool_calls": [CALL]}]) == "none"
    assert render("{{ messages[0].content + '!' }}", [{"role": "assistant"}]) == "!"


def test_arguments_are_parsed_for_the_template() -> None:
    call = {"id": "1", "function": {"name": "f", "arguments": '{"x": 1}'}}
    source = "{{ messages[0].tool_calls[0].function.arguments.x }}"
    assert render(source, [{"role": "assistant", "tool_calls": [call]}]) == "1"
    for text in ("{", "[" * 100_000):
        call["function"]["arguments"] = text  # type: ignore[index]
        with pytest.raises(RequestError, match=r"messages\[0\]\.tool_calls\[0\]\.function\.arguments is not valid JSON"):
            render(source, [{"role": "assistant", "tool_calls": [call]}])


def test_which_template_is_chosen() -> None:
    template = ChatTemplate({"default": "d", "tool_use": "t", "rag": "r"})
    assert [template.render([USER]), template.render([USER], tools=[TOOL]), template.render([USER], template="rag")] == ["d", "t", "r"]
    assert template.render([USER], template="{{ messages|length }}") == "1"
    with pytest.raises(RequestError, match="templates rag, tool_use: name one"):
        ChatTemplate({"rag": "r", "tool_use": "t"}).render([USER])
    with pytest.raises(RequestError, match="--chat-template"):
        ChatTemplate({}).render([USER])


def test_defaults_yield_to_the_request() -> None:
    template = ChatTemplate({"default": "{{ depth }}"}, defaults={"depth": 1})
    assert (template.render([USER]), template.render([USER], variables={"depth": 2})) == ("1", "2")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("a\n{{ raise_exception('roles must alternate') }}", "line 2: roles must alternate"),
        ("a\n\n{% if %}", "line 3: Expected an expression"),
        ("\n{{ messages[0].content + 1 }}", "line 2: can only concatenate"),
        ("{{ ''.__class__.__mro__ }}", "line 1: access to attribute '__class__'"),
        ("{% set ns = namespace(_x=1) %}", "must not begin with an underscore"),
        ("{{ messages.append(1) }}", "line 1: access to attribute 'append' of 'list' object is unsafe"),
        ("{{ nothing.at.all }}", "line 1: 'nothing' is undefined"),
    ],
)
def test_errors_name_the_line(source: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        render(source, [USER])


@pytest.mark.parametrize(
    ("chat", "message"),
    [
        ([], "messages is empty"),
        ([{"content": "x"}], r"messages\[0\] must be an object with a role"),
        ([USER, {"role": "user", "content": 3}], r"messages\[1\]\.content must be a string"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], r"messages\[0\]\.content\[0\] has type 'image_url'"),
        ([{"role": "user", "content": [{"type": ["text"]}]}], r"messages\[0\]\.content\[0\] has type \['text'\]"),
        ([{"role": "assistant", "content": "x", "tool_calls": 5}], r"messages\[0\]\.tool_calls must be a list of objects"),
        ([{"role": "assistant", "content": "x", "tool_calls": ["f"]}], r"messages\[0\]\.tool_calls must be a list of objects"),
        ([{"role": "assistant", "content": "x", "tool_calls": {"f": 1}}], r"messages\[0\]\.tool_calls must be a list of objects"),
    ],
)
def test_bad_messages_are_named(chat: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        render(SOURCES["chatml"], chat)


@pytest.mark.parametrize("name", ["messages", "add_generation_prompt", "tools", "documents"])
def test_variables_do_not_replace_fields_of_the_request(name: str) -> None:
    with pytest.raises(RequestError, match=f"^{name} is no template variable to set"):
        render(SOURCES["chatml"], [USER], variables={name: []})


def test_a_variable_may_have_any_other_name() -> None:
    assert render("{{ self_ }}{{ args }}", [USER], variables={"self": 1, "self_": 2, "args": 3}) == "23"


def test_the_callers_messages_are_left_alone() -> None:
    chat = [{"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}], "reasoning": "r"}]
    before = repr(chat)
    render(SOURCES["tools_and_reasoning"], chat)
    assert repr(chat) == before
