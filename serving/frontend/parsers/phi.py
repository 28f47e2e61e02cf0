"""Phi 4: a list of calls behind `functools`, or between `<|tool_call|>` and `<|/tool_call|>`."""

from __future__ import annotations

from pagoda.serving.frontend.parsers.events import CallShape, Family
from pagoda.serving.frontend.parsers.flow import scripted
from pagoda.serving.frontend.parsers.json_calls import marked

START, END = "<|tool_call|>", "<|/tool_call|>"
_SHAPE = CallShape('{"name": "', 'NAME", "arguments": ', "}", f"{START}[", ", ", f"]{END}", trigger=START, marks=(START, END))
PHI = Family(
    "tools",
    ("phi4_mini_json",),
    scripted(marked(("functools", START), (END,))),
    signs=("functools[", END),
    marks=(START, END),
    shapes=(_SHAPE,),
)
