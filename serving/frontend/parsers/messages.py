"""Muse Glimmer and Inkling: answers of messages or blocks, whose heads say whether they are thoughts, calls, or for the reader."""

from __future__ import annotations

import re

from pagoda.serving.frontend.parsers.events import CallShape, Content, Family, Reasoning
from pagoda.serving.frontend.parsers.flow import Flow, Script, scripted
from pagoda.serving.frontend.parsers.json_calls import marked
from pagoda.serving.frontend.parsers.tagged import Tags, tagged

START, MESSAGE, EOM, EOT = "<|start|>", "<|message|>", "<|eom|>", "<|eot|>"
SELF, USER = "self", "user"
_TO = re.compile(r"\bto=([\w.-]+)")
_OPENED = re.compile(r"<\|start\|>\s*assistant[^\S\n]*(?:to=([\w.-]+))?<\|message\|>\s*$")


def _muse(flow: Flow) -> Script[None]:
    """Thoughts are for `self`; calls go on, behind `<|message|>`, to whoever reads calls; the rest is for the reader."""
    opened = _OPENED.search(flow.context.prompt_end)
    flow.hold()
    recipient = (opened.group(1) or USER) if opened else (yield from _first_head(flow))
    thoughts = 0
    while True:
        if recipient == SELF:
            flow.say(Reasoning, "\n" if thoughts else "")
            thoughts += 1
            mark = yield from flow.plain(Reasoning, EOM, EOT, START)
        elif recipient == USER or not flow.context.tools:
            mark = yield from flow.plain(Content, EOM, EOT, START)
        else:
            flow.say(Content, MESSAGE)
            mark = yield from flow.plain(Content, EOM, EOT, START)
            flow.say(Content, EOM if mark else "")
        flow.drop()
        if not mark:
            return
        recipient = USER
        if mark == START:
            head = yield from flow.upto(MESSAGE)
            if head is None:
                return flow.cut()
            yield from flow.eat(MESSAGE)
            recipient = _recipient(head)


def _first_head(flow: Flow) -> Script[str]:
    """The prompt has written a message's beginning: ` to=NAME<|message|>`. What begins otherwise is for the reader, as it stands."""
    yield from flow.skip_space()
    if (yield from flow.eat("to=")):
        name = ""
        while (char := (yield from flow.peek())) and (char.isalnum() or char in "_.-"):
            name += flow.take(1)
        if not (yield from flow.eat(MESSAGE)):
            return USER
        flow.drop()
        return name
    if (yield from flow.eat(MESSAGE)):
        flow.drop()
    return USER


def _recipient(head: str) -> str:
    found = _TO.search(head)
    return found.group(1) if found else USER


_ATEM = "<atem:function_calls>", "</atem:function_calls>"
_NEXT = f"{START}assistant"
_TAGS = Tags(
    _ATEM[:1],
    ('<atem:invoke name="',),
    "</atem:invoke>",
    ('<atem:parameter name="',),
    "</atem:parameter>",
    (_ATEM[1], EOM, EOT),
    gates=(MESSAGE,),
    trim="",
    free=True,
)
MUSE = Family(
    "tools",
    ("muse_glimmer", "muse"),
    scripted(tagged(_TAGS)),
    signs=("<atem:",),
    marks=(START, MESSAGE, EOM, EOT),
    shapes=(
        CallShape(
            " to=",
            f'NAME{MESSAGE}{_ATEM[0]}\n<atem:invoke name="NAME">\n',
            f"</atem:invoke>\n{_ATEM[1]}{EOM}",
            between=_NEXT,
            marks=(START, MESSAGE, EOM, EOT),
            bare_name=True,
            style="atem",
            sayings=((f" to={SELF}{MESSAGE}", EOM + _NEXT),),
            final=f" to={USER}{MESSAGE}",
        ),
    ),
)
MUSE_REASONING = Family(
    "reasoning",
    ("muse_glimmer", "muse"),
    scripted(_muse),
    signs=("<atem:", "to=self"),
    marks=MUSE.marks,
    counted=((f"to={SELF}{MESSAGE}", f"{_NEXT} to={SELF}{MESSAGE}"), (EOM,)),
)

MODEL, TEXT, THINKING = "<|message_model|>", "<|content_text|>", "<|content_thinking|>"
INVOKE = "<|content_invoke_tool_json|>"
ENDS = "<|end_message|>", "<|content_model_end_sampling|>"
_KINDS = (TEXT, THINKING, INVOKE, "<|content_invoke_tool_text|>", "<|content_tool_error|>")
_ALL = (MODEL, *_KINDS, *ENDS)


def _inkling(flow: Flow) -> Script[None]:
    """Blocks, each behind a mark of its kind; what stands between the role and that is a name, and said to nobody."""
    prompt = flow.context.prompt_end.rstrip()
    mark = next((mark for mark in (MODEL, *_KINDS) if prompt.endswith(mark)), "")
    begun = False
    while mark or not begun:
        begun = True
        if mark == MODEL:
            if (yield from flow.upto(*_KINDS, *ENDS)) is None:
                return flow.cut()
            mark = yield from flow.eat(*_KINDS, *ENDS)
            flow.drop()
        calls = mark == INVOKE and bool(flow.context.tools)
        flow.say(Content, INVOKE if calls else "")
        if mark == THINKING:
            yield from flow.skip_space()
        mark = yield from flow.plain(Reasoning if mark == THINKING else Content, *_ALL)
        flow.say(Content, ENDS[0] if calls and mark else "")
        flow.drop()


INKLING = Family(
    "tools",
    ("inkling",),
    scripted(marked((INVOKE,), ENDS)),
    signs=(INVOKE,),
    marks=_ALL,
    shapes=(
        CallShape(
            f'{INVOKE}{{"name":"',
            'NAME","args":',
            f"}}{ENDS[0]}",
            between=MODEL,
            marks=_ALL,
            sayings=((THINKING, ENDS[0] + MODEL),),
            final=TEXT,
        ),
    ),
)
INKLING_REASONING = Family(
    "reasoning", ("inkling",), scripted(_inkling), signs=(THINKING,), marks=_ALL, counted=((THINKING, MODEL + THINKING), ENDS[:1])
)
