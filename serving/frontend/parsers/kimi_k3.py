"""Kimi K3: channels between `<|open|>NAME<|sep|>` and `<|close|>NAME<|sep|>`: think, response, tools with a call and its arguments."""

from __future__ import annotations

from pagoda.serving.frontend.parsers.events import CallShape, Family
from pagoda.serving.frontend.parsers.flow import scripted
from pagoda.serving.frontend.parsers.tagged import Tags, tagged
from pagoda.serving.frontend.parsers.thinking import thinking

OPEN, CLOSE, SEP = "<|open|>", "<|close|>", "<|sep|>"


def _channel(name: str) -> tuple[str, str]:
    return f"{OPEN}{name}{SEP}", f"{CLOSE}{name}{SEP}"


TOOLS, THINK, RESPONSE = (_channel(name) for name in ("tools", "think", "response"))
_CALL, _ARGUMENT = f'{OPEN}call tool="', f'{OPEN}argument key="'
_TAGS = Tags(
    TOOLS[:1],
    (_CALL,),
    _channel("call")[1],
    (_ARGUMENT,),
    _channel("argument")[1],
    TOOLS[1:],
    tag_end=SEP,
    whole=(f'{OPEN}json type="object"{SEP}', _channel("json")[1]),
)
KIMI3 = Family(
    "tools",
    ("kimi_k3",),
    scripted(tagged(_TAGS)),
    signs=(OPEN,),
    marks=(OPEN, CLOSE, SEP),
    shapes=(
        CallShape(
            _CALL,
            f'NAME" index="1"{SEP}',
            _channel("call")[1],
            before=TOOLS[0],
            after=TOOLS[1],
            trigger=TOOLS[0],
            marks=(OPEN, CLOSE, SEP),
            bare_name=True,
            style="kimi_k3_xml",
        ),
    ),
)
KIMI3_REASONING = Family(
    "reasoning",
    ("kimi_k3",),
    scripted(thinking(THINK[:1], THINK[1:], (RESPONSE,), until=TOOLS[:1], silent=_channel("message")[1:])),
    signs=(OPEN,),
    marks=(OPEN, CLOSE, SEP),
    opens=THINK[:1],
    closes=THINK[1:],
)
