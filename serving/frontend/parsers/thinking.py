"""Reasoning at the beginning of an answer, between two marks; the prompt may have opened it."""

from __future__ import annotations

from collections.abc import Callable

from pagoda.serving.frontend.parsers.events import Content, Family, Reasoning
from pagoda.serving.frontend.parsers.flow import Flow, Script, scripted


def thinking(
    opens: tuple[str, ...],
    closes: tuple[str, ...],
    answers: tuple[tuple[str, str], ...] = (),
    until: tuple[str, ...] = (),
    silent: tuple[str, ...] = (),
) -> Callable[[Flow], Script[None]]:
    """A script for one family. Space at both ends of the reasoning is none of it; without an opening all is content.

    Args:
        answers: pairs of marks that some families put around what follows; they and the space inside them are not said.
        until: what ends reasoning too, where a model forgets to: the beginning of calls, which stays for who reads those.
        silent: marks that are left out of what follows.
    """
    begins, ends = tuple(begin for begin, _ in answers), tuple(end for _, end in answers)

    def script(flow: Flow) -> Script[None]:
        flow.hold()
        yield from flow.skip_space()
        if (yield from flow.eat(*opens)) or flow.context.prompt_end.rstrip().endswith(opens):
            flow.drop()
            yield from flow.skip_space()
            mark = yield from flow.plain(Reasoning, *closes, *until)
            flow.drop()
            if mark in until:
                flow.unread(mark)
            yield from flow.skip_space()
        if answers and ((yield from flow.eat(*begins)) or flow.context.prompt_end.rstrip().endswith(begins)):
            flow.drop()
            yield from flow.skip_space()
            if (yield from flow.plain(Content, *ends)):
                flow.drop()
                yield from flow.skip_space()
        while silent and (yield from flow.plain(Content, *silent)):
            flow.drop()

    return script


TAGS = OPEN, CLOSE = "<think>", "</think>"


def _tagged(names: tuple[str, ...], signs: tuple[str | tuple[str, ...], ...], until: tuple[str, ...] = ()) -> Family:
    script = scripted(thinking((OPEN,), (CLOSE,), until=until))
    return Family("reasoning", names, script, signs=signs, marks=(*TAGS, *until), opens=(OPEN,), closes=(CLOSE,))


DEEPSEEK_THOUGHTS = _tagged(
    ("deepseek_v4", "deepseek_v41"), ("<｜DSML｜tool_calls", "<｜DSML｜ "), ("<｜DSML｜tool_calls>", "<｜DSML｜ calls>")
)
KIMI_THOUGHTS = _tagged(("kimi_k2",), (("<|tool_calls_section_begin|>", OPEN),), ("<|tool_calls_section_begin|>",))
THINK = _tagged(
    (
        "deepseek_r1",
        "qwen3",
        "deepseek_v3",
        "glm45",
        "glm47",
        "granite_thinking_parser",
        "ling3",
        "minimax_m2",
        "mimo",
        "nemotron_v3",
        "olmo3",
        "poolside_v1",
        "step3",
        "step3p5",
        "holo2",
        "minicpmv",
    ),
    TAGS,
)


def _appended(flow: Flow) -> Script[None]:
    """All is content, the thoughts with their marks, of which the prompt may have written the first."""
    flow.hold()
    yield from flow.skip_space()
    if not (yield from flow.eat(OPEN)) and (yield from flow.peek()):
        flow.say(Content, OPEN)
    flow.release()


APPEND_THINK = Family("reasoning", ("minimax_m2_append_think",), scripted(_appended), marks=TAGS)
