"""Reasoning at the beginning of an answer, between two marks; the prompt may have opened it."""

from __future__ import annotations

from collections.abc import Callable

from pagoda.serving.frontend.parsers.events import Content, Family, Reasoning
from pagoda.serving.frontend.parsers.flow import Flow, Script, scripted


def thinking(opens: tuple[str, ...], closes: tuple[str, ...], answer: tuple[str, str] | None = None) -> Callable[[Flow], Script[None]]:
    """A script for one family. Space at both ends of the reasoning is none of it; without an opening all is content.

    `answer`: marks that some families put around what follows; they and the space inside them are not said.
    """

    def script(flow: Flow) -> Script[None]:
        flow.hold()
        yield from flow.skip_space()
        if (yield from flow.eat(*opens)) or flow.context.prompt_end.rstrip().endswith(opens):
            flow.drop()
            yield from flow.skip_space()
            yield from flow.plain(Reasoning, *closes)
            flow.drop()
            yield from flow.skip_space()
        if answer and (yield from flow.eat(answer[0])):
            flow.drop()
            yield from flow.skip_space()
            if (yield from flow.plain(Content, answer[1])):
                flow.drop()
                yield from flow.skip_space()

    return script


TAGS = OPEN, CLOSE = "<think>", "</think>"
THINK = Family(
    "reasoning",
    (
        "deepseek_r1",
        "qwen3",
        "deepseek_v3",
        "glm45",
        "glm47",
        "kimi_k2",
        "minimax_m2",
        "mimo",
        "nemotron_v3",
        "olmo3",
        "step3",
        "hy_v3",
        "step3p5",
        "holo2",
        "minicpmv",
    ),
    scripted(thinking((OPEN,), (CLOSE,))),
    signs=(OPEN, CLOSE),
    marks=(OPEN, CLOSE),
    opens=(OPEN,),
    closes=(CLOSE,),
)
