"""GPT-OSS: messages in channels, `<|channel|>NAME<|message|>text<|end|>`; thoughts, the answer, and calls `to=functions.NAME`."""

from __future__ import annotations

import re

from pagoda.serving.frontend.parsers.events import CallShape, Content, Family, Reasoning
from pagoda.serving.frontend.parsers.flow import Flow, Script, scripted
from pagoda.serving.frontend.parsers.json_calls import read_arguments

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
ENDS = END, RETURN, CALL = "<|end|>", "<|return|>", "<|call|>"
MARKS = (START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS)
_TOOL = re.compile(r"to=(?:functions\.)?([\w.-]+)")


def _reasoning(flow: Flow) -> Script[None]:
    """Thoughts and the answer; calls go on as they stand to whoever reads calls."""
    flow.hold()
    yield from flow.skip_space()
    flow.drop()
    while mark := (yield from flow.plain(Content, CHANNEL, START, *ENDS)):
        flow.drop()
        if mark != CHANNEL:
            if mark == START:  # the role, "assistant", and for some calls a recipient
                yield from flow.upto(CHANNEL, MESSAGE)
            continue
        header = yield from flow.upto(MESSAGE)
        if header is None:
            return
        yield from flow.eat(MESSAGE)
        if _TOOL.search(header) and flow.context.tools:
            flow.say(Content, CHANNEL + header + MESSAGE)
            if mark := (yield from flow.plain(Content, *ENDS, START)):
                flow.drop()
                flow.say(Content, CALL)
                flow.unread(START if mark == START else "")
        elif header.strip().startswith("analysis"):
            yield from flow.plain(Reasoning, *ENDS, START, CHANNEL)
            flow.drop()


def _calls(flow: Flow) -> Script[None]:
    while (yield from flow.plain(Content, CHANNEL)):
        tool = _TOOL.search((yield from flow.upto(MESSAGE)) or "")
        if not tool or not (yield from flow.eat(MESSAGE)):
            continue
        yield from flow.skip_space()
        if (yield from flow.peek()) != "{":
            continue
        flow.call(tool.group(1))
        yield from read_arguments(flow, flow.arguments)
        yield from flow.skip_space()
        yield from flow.close(*ENDS)


_NEXT = f"{END}{START}assistant"
_SHAPE = CallShape(
    f"{CHANNEL}commentary to=functions.",
    f"NAME {CONSTRAIN}json{MESSAGE}",
    CALL,
    between=f"{START}assistant",
    marks=MARKS,
    bare_name=True,
    sayings=((f"{CHANNEL}analysis{MESSAGE}", _NEXT), (f"{CHANNEL}commentary{MESSAGE}", _NEXT)),
    final=f"{CHANNEL}final{MESSAGE}",
)
HARMONY = Family("tools", ("openai", "gpt_oss"), scripted(_calls), signs=(CHANNEL,), marks=MARKS, shapes=(_SHAPE,))
_THOUGHT = f"{CHANNEL}analysis{MESSAGE}"
HARMONY_REASONING = Family(
    "reasoning",
    ("openai_gptoss", "gpt_oss"),
    scripted(_reasoning),
    signs=(CHANNEL,),
    marks=MARKS,
    counted=((_THOUGHT, f"{START}assistant{_THOUGHT}"), (END,)),
)
