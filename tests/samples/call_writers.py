"""How each family of models writes calls and thoughts, for tests of the parsers: the marks are those of their chat templates."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

Call = tuple[str, dict[str, Any]]
HORIZON = "ifm|"
M3 = "]<]minimax[>["


class Writer(NamedTuple):
    """call: one of them, and its place. before, between, after: around and between them. texts: arguments are no JSON but texts."""

    call: Callable[[Call, int], str]
    before: str = ""
    between: str = "\n"
    after: str = ""
    texts: bool = False

    def write(self, calls: Sequence[Call]) -> str:
        return self.before + self.between.join(self.call(call, place) for place, call in enumerate(calls)) + self.after


def spelled(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def tags(call: Call, head: str, end: str, pair: str, sep: str = "") -> str:
    """`head`, `pair`: with NAME, KEY, VALUE and TYPE."""
    pairs = [
        pair.replace("KEY", key)
        .replace("TYPE", kind(value))
        .replace("STRING", json.dumps(isinstance(value, str)))
        .replace("VALUE", spelled(value))
        for key, value in call[1].items()
    ]
    return sep.join([head.replace("NAME", call[0]), *pairs, end])


def kind(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    return {str: "string", int: "number", float: "number", dict: "object", list: "array", type(None): "null"}[type(value)]


def elements(name: str, value: Any) -> str:
    if isinstance(value, dict) and value:
        value = "\n" + "\n".join(elements(key, each) for key, each in value.items()) + "\n"
    elif isinstance(value, list) and value:
        value = "".join(elements("item", each) for each in value)
    return f"{M3}<{name}>{spelled(value)}{M3}</{name}>"


def gemma(value: Any, quote: str) -> str:
    if isinstance(value, str):
        return quote + value + quote
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{gemma(each, quote)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(gemma(each, quote) for each in value) + "]"
    return json.dumps(value)


def python(call: Call) -> str:
    return f"{call[0]}({', '.join(f'{key}={value!r}' for key, value in call[1].items())})"


def obj(before: str, after: str, name: str = "name", arguments: str = "arguments", around: tuple[str, str] = ("", "")) -> Writer:
    """Objects, each between two marks."""
    return Writer(lambda call, place: f"{before}{json.dumps({name: call[0], arguments: call[1]})}{after}", around[0], "", around[1])


def listed(before: str, after: str, arguments: str = "arguments") -> Writer:
    return Writer(lambda call, place: json.dumps({"name": call[0], arguments: call[1]}), f"{before}[", ", ", f"]{after}")


def invokes(before: str, after: str, prefix: str = "", typed: bool = False) -> Writer:
    attribute = ' string="STRING"' if typed else ""
    pair = f'<{prefix}parameter name="KEY"{attribute}>VALUE</{prefix}parameter>'
    return Writer(
        lambda call, place: tags(call, f'<{prefix}invoke name="NAME">', f"</{prefix}invoke>", pair, "\n"),
        f"{before}\n",
        "\n",
        f"\n{after}",
        True,
    )


def functions(before: str, after: str, line: str = "\n") -> Writer:
    pair = f"<parameter=KEY>{line}VALUE{line}</parameter>"
    return Writer(lambda call, place: f"{before}\n{tags(call, '<function=NAME>', '</function>', pair, chr(10))}\n{after}", texts=True)


def pairs(prefix: str = "", suffix: str = "", section: bool = False, separator: str = "", typed: bool = False, line: str = "") -> Writer:
    def tag(name: str) -> str:
        return f"<{prefix}{name}{suffix}>"

    def end(name: str) -> str:
        return f"</{prefix}{name}{suffix}>"

    declared = f"{tag('arg_type')}TYPE{end('arg_type')}" if typed else ""
    pair = f"{tag('arg_key')}KEY{end('arg_key')}{line}{declared}{tag('arg_value')}VALUE{end('arg_value')}"
    head = f"{tag('tool_call')}NAME{separator and tag(separator)}"
    around = (tag("tool_calls"), end("tool_calls")) if section else ("", "")
    return Writer(lambda call, place: tags(call, head, end("tool_call"), pair, line), around[0], "\n", around[1], True)


def muse(call: Call, place: int) -> str:
    pair = '<atem:parameter name="KEY">VALUE</atem:parameter>'
    body = tags(call, '<atem:invoke name="NAME">', "</atem:invoke>", pair, "\n")
    return f"<|message|><atem:function_calls>\n{body}\n</atem:function_calls><|eom|>"


WRITERS: dict[str, Writer] = {
    "step3": Writer(
        lambda call, place: (
            "<｜tool_call_begin｜>function<｜tool_sep｜>"
            + tags(
                call,
                '<steptml:invoke name="NAME">',
                "</steptml:invoke>",
                '<steptml:parameter name="KEY">VALUE</steptml:parameter>',
                "\n",
            )
            + "<｜tool_call_end｜>"
        ),
        "<｜tool_calls_begin｜>\n",
        "\n",
        "\n<｜tool_calls_end｜>",
        True,
    ),
    "hermes": obj("<tool_call>\n", "\n</tool_call>\n"),
    "qwen3_coder": functions("<tool_call>", "</tool_call>"),
    "mimo": functions("<tool_call>", "</tool_call>", ""),
    "seed_oss": functions("<seed:tool_call>", "</seed:tool_call>"),
    "dots": invokes("<dots_function_call>", "</dots_function_call>"),
    "minimax_m2": invokes("<minimax:tool_call>", "</minimax:tool_call>"),
    "minimax_m3": Writer(
        lambda call, place: "\n".join(
            [f'{M3}<invoke name="{call[0]}">', *(elements(key, value) for key, value in call[1].items()), f"{M3}</invoke>"]
        ),
        f"{M3}<tool_call>\n",
        "\n",
        f"\n{M3}</tool_call>",
        True,
    ),
    "deepseek_v3": Writer(
        lambda call, place: f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{call[0]}\n```json\n{json.dumps(call[1])}\n```<｜tool▁call▁end｜>",
        "<｜tool▁calls▁begin｜>",
        "\n",
        "<｜tool▁calls▁end｜>",
    ),
    "deepseek_v31": Writer(
        lambda call, place: f"<｜tool▁call▁begin｜>{call[0]}<｜tool▁sep｜>{json.dumps(call[1])}<｜tool▁call▁end｜>",
        "<｜tool▁calls▁begin｜>",
        "",
        "<｜tool▁calls▁end｜>",
    ),
    "deepseek_v32": invokes("<｜DSML｜function_calls>", "</｜DSML｜function_calls>", "｜DSML｜", True),
    "deepseek_v4": invokes("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>", "｜DSML｜", True),
    "deepseek_v41": invokes("<｜DSML｜ calls>", "</｜DSML｜ calls>", "｜DSML｜ ", True),
    "glm45": pairs(line="\n"),
    "ling3": pairs(),
    "poolside_v1": pairs(line="\n"),
    "hy_v3": pairs(section=True, separator="tool_sep", line="\n"),
    "hy_v4": pairs(section=True),
    "k2_horizon": pairs(HORIZON, section=True),
    "kimi_k2": Writer(
        lambda call, place: (
            f"<|tool_call_begin|>functions.{call[0]}:{place}<|tool_call_argument_begin|>{json.dumps(call[1])}<|tool_call_end|>"
        ),
        "<|tool_calls_section_begin|>",
        "",
        "<|tool_calls_section_end|>",
    ),
    "kimi_k3": Writer(
        lambda call, place: tags(
            call,
            f'<|open|>call tool="NAME" index="{place + 1}"<|sep|>',
            "<|close|>call<|sep|>",
            '<|open|>argument key="KEY" type="TYPE"<|sep|>VALUE<|close|>argument<|sep|>',
        ),
        "<|open|>tools<|sep|>",
        "",
        "<|close|>tools<|sep|>",
        True,
    ),
    "minicpm5": Writer(
        lambda call, place: tags(call, '<function name="NAME">', "</function>", '<param name="KEY"><![CDATA[VALUE]]></param>'), texts=True
    ),
    "plamo3": Writer(
        lambda call, place: (
            f"<|plamo:begin_tool_request:plamo|><|plamo:begin_tool_name:plamo|>{call[0]}<|plamo:end_tool_name:plamo|>"
            f"<|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json<|plamo:msg|>{json.dumps(call[1])}"
            "<|plamo:end_tool_arguments:plamo|><|plamo:end_tool_request:plamo|>"
        ),
        "<|plamo:begin_tool_requests:plamo|>",
        "",
        "<|plamo:end_tool_requests:plamo|>",
    ),
    "muse_glimmer": Writer(muse, texts=True),
    "inkling": obj("<|content_invoke_tool_json|>", "<|end_message|>", arguments="args"),
    "gigachat3": obj("<|message_sep|>\n\nfunction call<|role_sep|>\n", ""),
    "openai": Writer(
        lambda call, place: f"<|channel|>commentary to=functions.{call[0]} <|constrain|>json<|message|>{json.dumps(call[1])}<|call|>",
        between="",
    ),
    "cohere_command4": Writer(
        lambda call, place: json.dumps({"tool_call_id": str(place), "tool_name": call[0], "parameters": call[1]}),
        "<|START_ACTION|>[\n    ",
        ",\n    ",
        "\n]<|END_ACTION|>",
    ),
    "internlm": obj("<|action_start|><|plugin|>\n", "<|action_end|>\n", arguments="parameters"),
    "longcat": obj("<longcat_tool_call>", "</longcat_tool_call>\n"),
    "nemotron_nano": listed("<TOOLCALL>", "</TOOLCALL>"),
    "jamba": listed("<tool_calls>", "</tool_calls>"),
    "granite": listed("<|tool_call|>", ""),
    "phi4_mini_json": listed("<|tool_call|>", "<|/tool_call|>"),
    "mistral": Writer(lambda call, place: f"[TOOL_CALLS]{call[0]}[ARGS]{json.dumps(call[1])}", between=""),
    "apertus": Writer(lambda call, place: json.dumps({call[0]: call[1]}), "<|tools_prefix|>[", ", ", "]<|tools_suffix|>"),
    "lfm2": Writer(lambda call, place: python(call), "<|tool_call_start|>[", ", ", "]<|tool_call_end|>"),
    "olmo3": Writer(lambda call, place: python(call), "<function_calls>\n", "\n", "\n</function_calls>"),
    "gemma4": Writer(lambda call, place: f"<|tool_call>call:{call[0]}{gemma(call[1], chr(60) + '|' + chr(34) + '|>')}<tool_call|>"),
    "functiongemma": Writer(lambda call, place: f"<start_function_call>call:{call[0]}{gemma(call[1], '<escape>')}<end_function_call>"),
}
"""By one name of each family whose calls may stand behind a text."""

THOUGHTS: dict[str, tuple[str, str]] = {
    **dict.fromkeys(("deepseek_r1", "qwen3", "ling3", "poolside_v1", "deepseek_v4", "deepseek_v41", "kimi_k2"), ("<think>", "</think>")),
    "hy_v4": ("<think>", "</think>"),
    "kimi_k3": ("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    "k2_horizon": ("<ifm|think_fast>", "</ifm|think_fast>"),
    "minimax_m3": ("<mm:think>", "</mm:think>"),
    "plamo3": ("<|plamo:begin_think:plamo|>", "<|plamo:end_think:plamo|>"),
    "cohere_command4": ("<|START_THINKING|>", "<|END_THINKING|>"),
    "seed_oss": ("<seed:think>", "</seed:think>"),
    "gemma4": ("<|channel>thought\n", "<channel|>"),
}
"""What stands around thoughts at the beginning of an answer."""
