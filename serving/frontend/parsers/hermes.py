"""Hermes, Qwen and many others: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`."""

from __future__ import annotations

from pagoda.serving.frontend.parsers.events import CallShape, Family
from pagoda.serving.frontend.parsers.flow import scripted
from pagoda.serving.frontend.parsers.json_calls import marked

START, END = "<tool_call>", "</tool_call>"
NAMES = ("hermes", "qwen", "qwen25", "qwen3_json", "granite4", "ernie45")
_SHAPE = CallShape(f'{START}\n{{"name": "', 'NAME", "arguments": ', f"}}\n{END}", between="\n", trigger=START, marks=(START, END))
HERMES = Family(
    "tools",
    NAMES,
    scripted(marked((START,), (END,))),
    signs=(START,),
    marks=(START, END),
    shapes=(_SHAPE,),
)
