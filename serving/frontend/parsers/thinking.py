"""Reasoning at the beginning of an answer, between two marks; the prompt may have opened it."""

from __future__ import annotations

from collections.abc import Callable

from pagoda.serving.frontend.parsers.events import Family, Reasoning
from pagoda.serving.frontend.parsers.flow import Flow, Script, scripted


def thinking(opens: tuple[str, ...], closes: tuple[str, ...]) -> Callable[[Flow], Script[None]]:
    """A script for one family. Space at both ends of the reasoning is none of it; without an opening all is content."""

    def script(flow: Flow) -> Script[None]:
        flow.hold()
        yield from flow.skip_space()
        if not (yield from flow.eat(*opens)) and not flow.context.prompt_end.rstrip().endswith(opens):
            return
        flow.drop()
        yield from flow.skip_space()
        yield from flow.plain(Reasoning, *closes)
        flow.drop()
        yield from flow.skip_space()

    return script


TAGS = OPEN, CLOSE = "<think>", "</think>"
THINK = Family(
    "reasoning",
    ("deepseek_r1", "qwen3", "deepseek_v3", "glm45"),
    scripted(thinking((OPEN,), (CLOSE,))),
    signs=(OPEN, CLOSE),
    marks=(OPEN, CLOSE),
)
