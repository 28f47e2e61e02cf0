"""How `--help` looks: sections, one option a line or two, defaults at the end; colour only on a terminal."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pagoda.serving.cli.flags import Option

_COLUMN = 30


def command_help(prog: str, usage: str, summary: str, sections: Mapping[str, Sequence[Option]]) -> str:
    """The help of one command."""
    width = min(shutil.get_terminal_size().columns, 110)
    lines = [bold(f"{prog} {usage}"), "", *textwrap.wrap(summary, width)]
    for title, options in sections.items():
        lines += ["", bold(title), *(line for option in options for line in _option_lines(option, width))]
    return "\n".join(lines) + "\n"


def rows(pairs: Sequence[tuple[str, str]], column: int = _COLUMN) -> list[str]:
    """Two columns: names in colour, wrapped text beside them."""
    width = min(shutil.get_terminal_size().columns, 110)
    return [line for name, text in pairs for line in _row(name, text, width, column)]


def bold(text: str) -> str:
    return _painted(text, "1")


def _option_lines(option: Option, width: int) -> list[str]:
    name = option.names[0]
    if option.kind == "bool":
        names = f"--[no-]{name[2:]}" if option.default is True else name
    else:
        names = " ".join([", ".join([name, *option.flag.aliases]), "" if option.metavar.startswith("{") else option.metavar]).rstrip()
    return _row(names, option.flag.help + _ending(option), width, _COLUMN)


def _ending(option: Option) -> str:
    facts = []
    if option.kind == "bool" and option.default is True:
        facts.append("on by default")
    if option.metavar.startswith("{"):
        facts.append(f"one of {option.metavar.strip('{}').replace(',', ', ')}")
    if option.kind != "bool" and option.default not in (None, (), {}, ""):
        facts.append(f"default {_shown(option.default)}")
    return f" [{'; '.join(facts)}]" if facts else ""


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _row(name: str, text: str, width: int, column: int) -> list[str]:
    wrapped = textwrap.wrap(text, max(width - column, 24)) or [""]
    head = "  " + _painted(name, "36")
    if len(name) + 4 > column:
        return [head, *(" " * column + line for line in wrapped)]
    return [head + " " * (column - len(name) - 2) + wrapped[0], *(" " * column + line for line in wrapped[1:])]


def _painted(text: str, code: str) -> str:
    return f"\033[{code}m{text}\033[0m" if sys.stdout.isatty() else text
