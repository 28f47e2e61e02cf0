"""Mistral: `[TOOL_CALLS]` before a list of call objects, or before `name[ARGS]{…}`; reasoning in `[THINK]`."""

from __future__ import annotations

import re
import uuid

from pagoda.serving.frontend.parsers.events import CallShape, Content, Family
from pagoda.serving.frontend.parsers.flow import Flow, Script, scripted
from pagoda.serving.frontend.parsers.json_calls import read_arguments, read_calls
from pagoda.serving.frontend.parsers.thinking import thinking

START, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_NAME = re.compile(r"[\w./:-]+")


def _calls(flow: Flow) -> Script[None]:
    while (yield from flow.plain(Content, START)):
        yield from flow.skip_space()
        if (yield from flow.peek()) in ("[", "{"):
            yield from read_calls(flow)
        else:
            yield from _named(flow)


def _named(flow: Flow) -> Script[None]:
    name = yield from flow.upto(CALL_ID, ARGS, "{")
    if not name or not _NAME.fullmatch(name.strip()):
        return
    if (yield from flow.eat(CALL_ID)):
        yield from flow.upto(ARGS)
    yield from flow.eat(ARGS)
    yield from flow.skip_space()
    if (yield from flow.peek()) == "{":
        flow.call(name.strip())
        yield from read_arguments(flow, flow.arguments)


def _call_id() -> str:
    """Mistral's templates take ids of nine letters and digits alone."""
    return uuid.uuid4().hex[:9]


_MARKS = (START, CALL_ID, ARGS)
_NAMED = CallShape(START, f"NAME{ARGS}", "", trigger=START, marks=_MARKS, bare_name=True, needs=ARGS)
_LISTED = CallShape('{"name": "', 'NAME", "arguments": ', "}", f"{START}[", ", ", "]", trigger=START, marks=_MARKS)
MISTRAL = Family("tools", ("mistral",), scripted(_calls), (START,), _MARKS, call_id=_call_id, shapes=(_NAMED, _LISTED))

THINK, UNTHINK = "[THINK]", "[/THINK]"
MISTRAL_REASONING = Family(
    "reasoning",
    ("mistral",),
    scripted(thinking((THINK,), (UNTHINK,))),
    signs=(THINK,),
    marks=(THINK, UNTHINK),
    opens=(THINK,),
    closes=(UNTHINK,),
)
