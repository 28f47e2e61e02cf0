"""A pair of tags an argument, `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>value</arg_value>…</tool_call>`: GLM 4.5 and later,
Ling 3 and Laguna; Hunyuan 3 and 4, with a suffix in each tag and a section around; K2 Horizon. Values are typed by the tool."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from pagoda.serving.frontend.parsers.events import CallShape, Content, Family
from pagoda.serving.frontend.parsers.flow import Flow, Script, scripted
from pagoda.serving.frontend.parsers.json_calls import read_call
from pagoda.serving.frontend.parsers.tagged import typed
from pagoda.serving.frontend.parsers.thinking import thinking

_NAME = re.compile(r"[\w.:/-]+")
_SUFFIXED = re.compile(r"<(?:think|tool_calls?|arg_key|arg_value)(:[^\s>]+)>")


@dataclass(frozen=True)
class Pairs:
    """How one family spells them.

    call, key, value: each a mark before and one behind. section: marks around all calls. separator: what may stand behind a name.
    kind: marks around an argument's type, which counts where the tool gives none. as_json: a call may be an object instead.
    """

    call: tuple[str, str]
    key: tuple[str, str]
    value: tuple[str, str]
    section: tuple[str, str] | None = None
    separator: str = ""
    kind: tuple[str, str] | None = None
    as_json: bool = False

    @property
    def marks(self) -> tuple[str, ...]:
        return (*self.call, *self.key, *self.value, *(self.section or ()), *(self.kind or ()), *filter(None, [self.separator]))


def paired(pairs: Pairs) -> Callable[[Flow], Script[None]]:
    """The script of one family."""
    call, section = pairs.call[0], pairs.section

    def script(flow: Flow) -> Script[None]:
        while mark := (yield from flow.plain(Content, call, *(section[:1] if section else ()))):
            if section and mark == section[0]:
                yield from flow.skip_space()
                mark = yield from flow.eat(call)
            while mark == call and (yield from _call(flow, pairs)) and section:
                flow.hold()
                yield from flow.skip_space()
                mark = yield from flow.eat(call, section[1])
                if mark == section[1]:
                    flow.drop()

    return script


def _call(flow: Flow, pairs: Pairs) -> Script[bool]:
    end, key = pairs.call[1], pairs.key[0]
    yield from flow.skip_space()
    if pairs.as_json and (yield from flow.peek()) == "{":
        before = flow.calls
        yield from read_call(flow)
        if flow.calls > before:
            yield from _close(flow, pairs)
        return flow.calls > before
    name = yield from flow.upto(*filter(None, [pairs.separator]), key, end)
    if name is None:
        name = flow.take(len(flow.before_cut(end) or ""))
    elif pairs.separator:
        yield from flow.eat(pairs.separator)
    name = name.strip()
    if not _NAME.fullmatch(name):
        return False
    flow.call(name)
    yield from _arguments(flow, pairs, name)
    yield from _close(flow, pairs)
    return True


def _close(flow: Flow, pairs: Pairs) -> Script[None]:
    yield from flow.skip_space()
    yield from flow.close(pairs.call[1], pairs.key[0])


def _arguments(flow: Flow, pairs: Pairs, name: str) -> Script[None]:
    schema, between = flow.context.tools.get(name, {}), "{"
    yield from flow.skip_space()
    while (yield from flow.eat(pairs.key[0])):
        key = yield from _upto(flow, pairs.key[1])
        yield from flow.skip_space()
        declared = (yield from _upto(flow, pairs.kind[1])) if pairs.kind and (yield from flow.eat(pairs.kind[0])) else None
        yield from _upto(flow, pairs.value[0])
        text = yield from _upto(flow, pairs.value[1])
        if key is None or text is None:
            return flow.cut()
        key = key.strip()
        value = json.dumps(typed(text, schema, key, _base(declared)), ensure_ascii=False)
        flow.arguments(f"{between}{json.dumps(key, ensure_ascii=False)}: {value}")
        between = ", "
        yield from flow.skip_space()
    if flow.text.startswith(pairs.call[1]) or not flow.ended or flow.cut_in(pairs.call[1], pairs.key[0]):
        flow.arguments("{}" if between == "{" else "}")


def _upto(flow: Flow, mark: str) -> Script[str | None]:
    text = yield from flow.upto(mark)
    yield from flow.eat(mark)
    return text


def _base(declared: str | None) -> str:
    """Out of `array[string]` and the like."""
    return (declared or "string").partition("[")[0].strip().lower() or "string"


def _tags(name: str, prefix: str = "", suffix: str = "") -> tuple[str, str]:
    return f"<{prefix}{name}{suffix}>", f"</{prefix}{name}{suffix}>"


def _spelled(prefix: str = "", suffix: str = "") -> Pairs:
    call, key, value = (_tags(name, prefix, suffix) for name in ("tool_call", "arg_key", "arg_value"))
    return Pairs(call, key, value)


_GLM = _spelled()
GLM = Family(
    "tools",
    ("glm45", "glm47", "ling3", "poolside_v1"),
    scripted(paired(_GLM)),
    signs=(_GLM.key[0],),
    marks=_GLM.marks,
    shapes=(
        CallShape(_GLM.call[0], "NAME", _GLM.call[1], between="\n", trigger=_GLM.call[0], marks=_GLM.call, bare_name=True, style="glm_xml"),
    ),
)


def _hunyuan(name: str, separator: str, suffix: str = "") -> Family:
    pairs = replace(_spelled(suffix=suffix), section=_tags("tool_calls", suffix=suffix), separator=separator and f"<{separator}{suffix}>")
    assert pairs.section is not None
    line = "\n" if separator else ""  # the third writes each part on a line of its own
    around = {"before": pairs.section[0] + line, "after": pairs.section[1], "trigger": pairs.section[0], "marks": pairs.marks}
    style = {"bare_name": True, "style": "pair_lines" if separator else "pairs", "suffix": suffix}
    return Family(
        "tools",
        (name,),
        scripted(paired(pairs)),
        signs=(("<tool_sep", "<arg_key"),) if separator else (("<tool_calls", "<arg_key"),),
        marks=pairs.marks,
        shapes=(CallShape(pairs.call[0], "NAME" + pairs.separator + line, pairs.call[1] + line, **style, **around),),  # type: ignore[arg-type]
        fitted=lambda hints: _hunyuan(name, separator, suffix_in(hints.words)),
    )


def suffix_in(words: Sequence[str]) -> str:
    """What a Hunyuan checkpoint has behind the name in each of its tags, `:…`; empty in most."""
    return next((found.group(1) for word in words if (found := _SUFFIXED.fullmatch(word))), "")


HUNYUAN3, HUNYUAN4 = _hunyuan("hy_v3", "tool_sep"), _hunyuan("hy_v4", "")


def _hunyuan_thoughts(suffix: str = "") -> Family:
    tags = opens, closes = _tags("think", suffix=suffix)
    return Family(
        "reasoning",
        ("hy_v3", "hy_v4"),
        scripted(thinking((opens,), (closes,))),
        signs=(("<tool_calls", "<arg_key", "<think"),),
        marks=tags,
        opens=(opens,),
        closes=(closes,),
        fitted=lambda hints: _hunyuan_thoughts(suffix_in(hints.words)),
    )


HUNYUAN_THOUGHTS = _hunyuan_thoughts()

_HORIZON = replace(_spelled("ifm|"), section=_tags("ifm|tool_calls"), kind=_tags("ifm|arg_type"), as_json=True)
_OPENS, _CLOSES = (tuple(_tags(f"ifm|{name}")[side] for name in ("think", "think_fast", "think_faster")) for side in (0, 1))
HORIZON = Family(
    "tools",
    ("k2_horizon",),
    scripted(paired(_HORIZON)),
    signs=("<ifm|tool_call",),
    marks=_HORIZON.marks,
    shapes=(
        CallShape(
            _HORIZON.call[0],
            "NAME",
            _HORIZON.call[1],
            before=_tags("ifm|tool_calls")[0],
            after=_tags("ifm|tool_calls")[1],
            trigger=_tags("ifm|tool_calls")[0],
            marks=_HORIZON.marks,
            bare_name=True,
            style="ifm_pairs",
        ),
    ),
)
HORIZON_THOUGHTS = Family(
    "reasoning",
    ("k2_horizon",),
    scripted(thinking(_OPENS, _CLOSES, until=_tags("ifm|tool_calls")[:1])),
    signs=("<ifm|think",),
    marks=(*_OPENS, *_CLOSES),
    opens=_OPENS,
    closes=_CLOSES,
)
