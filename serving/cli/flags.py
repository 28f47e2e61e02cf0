"""Command-line options made from annotated dataclasses: the field's type says how a value is read, its `Flag` what help says."""

from __future__ import annotations

import argparse
import difflib
import json
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

from pagoda.hal.errors import ConfigError
from pagoda.serving.cli import help_text
from pagoda.serving.cli.compat import Foreign
from pagoda.serving.cli.config_file import arguments_of_file, spelled
from pagoda.serving.engine.config import Flag

T = TypeVar("T")
_SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}


@dataclass(frozen=True)
class Option:
    """One field as an option. `kind` is "bool", "map" (KEY=VALUE, repeatable), "json", "many" (repeatable) or "one"."""

    name: str
    flag: Flag
    kind: str
    convert: Callable[[str], Any]
    metavar: str
    default: Any

    @property
    def names(self) -> tuple[str, ...]:
        """All spellings, the field's own first."""
        return (spelled(self.name), *self.flag.aliases)


class Parser(argparse.ArgumentParser):
    """A command's options. Wrong ones raise `ConfigError`; values stay unset until given, so that dataclasses keep their defaults."""

    def __init__(self, command: str, summary: str, usage: str = "[options]", words: int = 0) -> None:
        """`words`: how many plain words may stand among the options; `values` gives them as "words"."""
        super().__init__(prog=f"pagoda {command}", description=summary, usage=usage, allow_abbrev=False, add_help=False)
        self.sections: dict[str, list[Option]] = {}
        self.words = words
        self.add_argument("-h", "--help", action="help")

    @property
    def spellings(self) -> frozenset[str]:
        """All spellings of the options so far."""
        return frozenset(self._option_string_actions)

    def add_config_file(self) -> None:
        """`--config FILE`."""
        flag = Flag("YAML file of options, by their names here; the command line wins.")
        self.add_option(Option("config", flag, "one", str, "FILE", None), "Files")

    def add_config(self, config: type, title: str = "Options") -> None:
        """Every field of a dataclass as an option, under the sections that its flags open.

        A field whose name is here already (`seed` of a load and of an engine) is set by the same option.
        """
        here = {option.name for options in self.sections.values() for option in options}
        for option in options_of(config):
            title = option.flag.section or title
            if option.name not in here:
                self.add_option(option, title)

    def add_foreign(self, flags: Sequence[Foreign]) -> None:
        """A peer's flags: read, judged by `Foreign.read`, which may set an option of ours, and left out of `--help`."""
        for flag in flags:
            names = [*flag.names, *("--no-" + name[2:] for name in flag.names if flag.switch and name.startswith("--"))]
            self.add_argument(
                *names, dest="_foreign", default=argparse.SUPPRESS, action=_foreign_action(flag), nargs=0 if flag.switch else None
            )

    def add_option(self, option: Option, title: str) -> None:
        self.sections.setdefault(title, []).append(option)
        if option.kind == "bool":
            self.add_argument(*option.names, dest=option.name, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS)
        elif option.kind == "many":
            self.add_argument(*option.names, dest=option.name, action="extend", nargs="+", type=option.convert, default=argparse.SUPPRESS)
        elif option.kind == "map":
            self.add_argument(*option.names, dest=option.name, action="append", type=option.convert, default=argparse.SUPPRESS)
        else:
            self.add_argument(*option.names, dest=option.name, type=option.convert, default=argparse.SUPPRESS)

    def values(self, argv: Sequence[str]) -> dict[str, Any]:
        """What `argv` gives, by field name; `--help` prints and exits. A `--config` file's values stand under the command line's."""
        given = self._parse(argv)
        path = given.pop("config", None)
        return given if path is None else self._parse(arguments_of_file(path)) | given

    def format_help(self) -> str:
        return help_text.command_help(self.prog, self.usage or "", self.description or "", self.sections)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")

    def _parse(self, argv: Sequence[str]) -> dict[str, Any]:
        end = argv.index("--") if "--" in argv else len(argv)
        namespace, rest = self.parse_known_args([_dashed(word) for word in argv[:end]])
        unknown = next((word for word in rest if word.startswith("-") and word != "-"), None)
        if unknown is not None:
            self._refuse(unknown)
        words = [*rest, *argv[end + 1 :]]
        if len(words) > self.words:
            raise ConfigError(f"unexpected argument {words[self.words]!r}; see {self.prog} --help")
        return {name: _merged(value) for name, value in vars(namespace).items()} | ({"words": words} if words else {})

    def _refuse(self, word: str) -> NoReturn:
        flag = word.split("=", 1)[0]
        whole = flag.split(".", 1)[0]
        if whole in self._option_string_actions and whole != flag:
            raise ConfigError(f"unknown flag {flag}: give {whole} its value as JSON, as in {whole} '{{\"{flag[len(whole) + 1 :]}\": …}}'")
        own = [name for options in self.sections.values() for option in options for name in option.names]
        near = difflib.get_close_matches(flag, own, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else f"see {self.prog} --help"
        raise ConfigError(f"unknown flag {flag}; {hint}")


def _foreign_action(flag: Foreign) -> type[argparse.Action]:
    class Judge(argparse.Action):
        def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
            name = option_string or flag.names[0]
            ours = flag.read(name, ("off" if name.startswith("--no-") else "on") if flag.switch else str(values))
            if ours is not None:
                setattr(namespace, *ours)

    return Judge


def build(config: type[T], values: Mapping[str, Any]) -> T:
    """The dataclass from those of `values` that are its fields; the rest keep their defaults."""
    known = {f.name for f in fields(config)}  # type: ignore[arg-type]
    return config(**{name: tuple(v) if isinstance(v, list) else v for name, v in values.items() if name in known})


def options_of(config: type) -> list[Option]:
    """An option for every field that has a `Flag`."""
    hints = get_type_hints(config, include_extras=True)
    return [option for f in fields(config) if (option := _option(f.name, hints[f.name], _default(f))) is not None]


def _default(f: Any) -> Any:
    return f.default_factory() if f.default_factory is not MISSING else f.default


def _option(name: str, hint: Any, default: Any) -> Option | None:
    flag = next((extra for extra in getattr(hint, "__metadata__", ()) if isinstance(extra, Flag)), None)
    if flag is None:
        return None
    kind, convert, metavar = _reading(spelled(name), get_args(hint)[0])
    return Option(name, flag, kind, convert, flag.metavar or metavar, default)


def _reading(flag: str, hint: Any) -> tuple[str, Callable[[str], Any], str]:
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        inner = next(arg for arg in get_args(hint) if arg is not types.NoneType)
        kind, convert, metavar = _reading(flag, inner)
        return kind, _or_none(convert) if inner in (int, float) else convert, metavar
    if origin is Literal:
        return "one", _choice(flag, get_args(hint)), "{" + ",".join(map(str, get_args(hint))) + "}"
    if origin is tuple:
        return "many", _reading(flag, get_args(hint)[0])[1], "VALUE"
    if origin is dict:
        return ("map", _pair(flag), "KEY=VALUE") if get_args(hint) == (str, str) else ("json", _json(flag), "JSON")
    if hint is bool:
        return "bool", bool, ""
    readers: dict[Any, Callable[[str], Any]] = {int: _integer(flag), float: _number(flag), str: str}
    return "one", readers[hint], {int: "N", float: "X", str: "TEXT"}[hint]


def _or_none(convert: Callable[[str], Any]) -> Callable[[str], Any]:
    return lambda text: None if text in ("auto", "none", "-1") else convert(text)


def _choice(flag: str, allowed: tuple[Any, ...]) -> Callable[[str], Any]:
    by_text = {str(value): value for value in allowed}

    def convert(text: str) -> Any:
        if text not in by_text:
            raise ConfigError(f"{flag} {text!r} must be one of {', '.join(by_text)}")
        return by_text[text]

    return convert


def _integer(flag: str) -> Callable[[str], int]:
    """`32k` is 32,000 and `32K` is 32,768, as in `vllm serve`."""

    def convert(text: str) -> int:
        number, scale = (text[:-1], _SUFFIXES[text[-1]]) if text[-1:] in _SUFFIXES else (text, 1)
        try:
            return int(number) if scale == 1 else int(float(number) * scale)
        except ValueError:
            raise ConfigError(f"{flag} {text!r} must be a whole number, such as 4096, 4k or 4K") from None

    return convert


def _number(flag: str) -> Callable[[str], float]:
    def convert(text: str) -> float:
        try:
            return float(text)
        except ValueError:
            raise ConfigError(f"{flag} {text!r} must be a number") from None

    return convert


def _pair(flag: str) -> Callable[[str], dict[str, str]]:
    def convert(text: str) -> dict[str, str]:
        if text.startswith("{"):
            return {str(key): str(value) for key, value in _json(flag)(text).items()}
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise ConfigError(f"{flag} {text!r} must be KEY=VALUE")
        return {key: value}

    return convert


def _json(flag: str) -> Callable[[str], dict[str, Any]]:
    def convert(text: str) -> dict[str, Any]:
        try:
            value = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"{flag} {text!r} is not valid JSON: {error}") from None
        if not isinstance(value, dict):
            raise ConfigError(f'{flag} {text!r} must be a JSON object, such as {{"key": 1}}')
        return value

    return convert


def _dashed(word: str) -> str:
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value


def _merged(value: Any) -> Any:
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return {key: item for part in value for key, item in part.items()}
    return value
