"""Granite 3: a list of calls behind `<|tool_call|>`; reasoning between two sentences."""

from __future__ import annotations

from pagoda.serving.frontend.parsers.events import CallShape, Family
from pagoda.serving.frontend.parsers.flow import scripted
from pagoda.serving.frontend.parsers.json_calls import marked
from pagoda.serving.frontend.parsers.thinking import thinking

MARKS = ("<|tool_call|>", "<tool_call>", "<function_call>")


def _listed(mark: str, needs: str) -> CallShape:
    """Calls as a list behind a mark."""
    listed = {"before": f"{mark}[", "between": ", ", "after": "]", "trigger": mark, "marks": MARKS}
    return CallShape('{"name": "', 'NAME", "arguments": ', "}", needs=needs, **listed)


_FUNCTION = CallShape(
    '<function_call> {"name": "', 'NAME", "arguments": ', "}", trigger="<function_call>", marks=MARKS, needs="<function_call>"
)
GRANITE = Family(
    "tools",
    ("granite", "granite-20b-fc"),
    scripted(marked(MARKS)),
    signs=("<|tool_call|>", "<function_call>"),
    marks=MARKS,
    shapes=(_listed("<|tool_call|>", "<|tool_call|>"), _listed("<tool_call>", "<tool_call>"), _FUNCTION, _listed("<|tool_call|>", "")),
)

OPENS = ("Here is my thought process:", "Here's my thought process:")
CLOSES = ("Here is my response:", "Here's my response:")
GRANITE_REASONING = Family("reasoning", ("granite",), scripted(thinking(OPENS, CLOSES)), signs=OPENS, opens=OPENS, closes=CLOSES)
