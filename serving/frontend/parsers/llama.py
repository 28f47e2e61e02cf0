"""Llama 3 and models without marks: an answer that is a call object, `{"name": …, "parameters": {…}}`, or begins with a mark."""

from __future__ import annotations

from pagoda.serving.frontend.parsers.events import CallShape, Family
from pagoda.serving.frontend.parsers.flow import Flow, Script, scripted
from pagoda.serving.frontend.parsers.json_calls import marked, read_calls

TAG, START, END = "<|python_tag|>", "<|python_start|>", "<|python_end|>"


def bare(flow: Flow) -> Script[None]:
    """Calls without a mark: the answer begins with one, of a tool that the request offers."""
    flow.hold()
    yield from flow.skip_space()
    if (yield from flow.peek()) in ("{", "["):
        yield from read_calls(flow, known_only=True)


def _llama3(flow: Flow) -> Script[None]:
    yield from bare(flow)
    yield from marked((TAG, START), (END,))(flow)


SIGNS = (TAG, 'Respond in the format {"name": ')
LLAMA3 = Family(
    "tools",
    ("llama3_json", "llama4_json", "llama3"),
    scripted(_llama3),
    signs=SIGNS,
    marks=(TAG, START, END),
    shapes=(CallShape('{"name": "', 'NAME", "parameters": ', "}", between="; "),),
)
_PLAIN = CallShape('{"name": "', 'NAME", "arguments": ', "}", between="\n")
JSON = Family("tools", ("json",), scripted(bare), shapes=(_PLAIN,))
