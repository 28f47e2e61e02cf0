"""A conversation in the terminal: what was said, the settings, and the commands that begin with a slash."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pagoda.hal.errors import RequestError
from pagoda.serving.engine.params import SamplingParams


class Leave(Exception):
    """The user has finished."""


@dataclass
class Conversation:
    """Messages so far; `settings` are sampling settings by name."""

    settings: dict[str, Any] = field(default_factory=dict)
    system: str | None = None
    turns: list[dict[str, str]] = field(default_factory=list)

    @property
    def messages(self) -> list[dict[str, str]]:
        """What the model reads, the system's message first."""
        return [*([{"role": "system", "content": self.system}] if self.system else []), *self.turns]

    def say(self, text: str) -> None:
        self.turns.append({"role": "user", "content": text})

    def hear(self, text: str) -> None:
        """The model's answer; an empty one takes the question back, so that it can be asked again."""
        if text:
            self.turns.append({"role": "assistant", "content": text})
        else:
            self.turns.pop()

    def command(self, line: str) -> str:
        """Do what a line such as "/temp 0.5" says; returns what to tell. Raises `RequestError` for a wrong one, `Leave`."""
        name, _, rest = line[1:].strip().partition(" ")
        commands: dict[str, Callable[[str], str]] = {
            "help": self._help,
            "system": self._system,
            "temp": self._temperature,
            "clear": self._clear,
            "save": self._save,
            "quit": self._quit,
            "exit": self._quit,
            "bye": self._quit,
        }
        if name not in commands:
            near = difflib.get_close_matches(name, commands, n=1)
            raise RequestError(f"no command /{name}; " + (f"did you mean /{near[0]}?" if near else "/help lists them"))
        return commands[name](rest.strip())

    def _help(self, _: str) -> str:
        return HELP

    def _system(self, text: str) -> str:
        if not text:
            return f"System message: {self.system or 'none'}"
        self.system = None if text == "none" else text
        return "System message removed." if self.system is None else "System message set."

    def _temperature(self, text: str) -> str:
        if text:
            try:
                value = float(text)
            except ValueError:
                raise RequestError(f"/temp {text!r} must be a number, such as 0 or 0.7") from None
            SamplingParams(temperature=value)
            self.settings["temperature"] = value
        return f"Temperature: {self.settings.get('temperature', 'the model’s own')}"

    def _clear(self, _: str) -> str:
        self.turns.clear()
        return "Forgotten; the system message stays."

    def _save(self, text: str) -> str:
        if not text:
            raise RequestError("/save needs a file: .md is text for people, everything else JSON messages")
        path = Path(text).expanduser()
        try:
            path.write_text(self.markdown() if path.suffix == ".md" else json.dumps(self.messages, indent=2, ensure_ascii=False) + "\n")
        except OSError as error:
            raise RequestError(f"cannot save to {path}: {error.strerror}") from error
        return f"Saved {len(self.messages)} messages to {path}."

    def _quit(self, _: str) -> str:
        raise Leave

    def markdown(self) -> str:
        """The conversation as text for people."""
        return "".join(f"**{message['role']}**\n\n{message['content']}\n\n" for message in self.messages)


HELP = """\
/system TEXT  set the system message (`/system none` removes it)
/temp X       set the temperature; 0 always takes the likeliest token
/clear        forget the conversation
/save FILE    write it to a file (.md as text, else JSON)
/quit         leave, as does Ctrl-D
A line that ends in \\ goes on in the next. Ctrl-C stops an answer."""
