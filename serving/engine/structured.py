"""What an output must look like: `StructuredOutputsParams`, with vLLM's names, and `StructuredOutputsConfig`, the engine's side of it."""

from __future__ import annotations

import json as json_text
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple

from pagoda.hal.errors import ConfigError, RequestError

MAX_SOURCE = 1 << 18
"""Most characters of a schema, an expression or a grammar."""
MAX_DEPTH = 64
"""Deepest nesting of a schema or a structural tag."""

Kind = Literal["json", "regex", "choice", "grammar", "json_object", "structural_tag"]
KINDS: tuple[Kind, ...] = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


class Thinking(NamedTuple):
    """Reasoning before the output, which is free: it begins with one of `opens` or has begun in the prompt, with that of place `opened`;
    one of `closes` ends it, and after `budget` tokens, where there is one, that of the same place, or the first. `repeats`: it may begin
    again after an end, and its tokens are counted on."""

    opens: tuple[str, ...]
    closes: tuple[str, ...]
    begun: bool
    budget: int | None = None
    opened: int = 0
    repeats: bool = False


@dataclass(frozen=True)
class StructuredOutputsParams:
    """One kind of output; anything else raises `RequestError` naming the field.

    Attributes:
        json: a JSON schema (as an object, a boolean or their text). json_object: any JSON object.
        regex: an expression that the whole output matches. choice: texts of which it is one.
        grammar: in EBNF (GBNF) or Lark. structural_tag: in xgrammar's form, as an object or its text.
        disable_any_whitespace: JSON has no blanks but those that `json.dumps` writes.
        disable_additional_properties: objects hold the properties that their schema lists, no others. None: so it is, unless the schema
            speaks of further ones; False: as JSON Schema has it, further ones are allowed.
        whitespace_pattern: an expression for what may stand between two parts of JSON.
        thinking: reasoning that may come before, set by the server. free: any output, for which only the reasoning is bound.
        origin: the request's field that asked for it, which errors name.
    """

    json: str | dict[str, Any] | bool | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None
    thinking: Thinking | None = None
    free: bool = False
    origin: str = "structured_outputs"

    def __post_init__(self) -> None:
        for name in ("json", "structural_tag"):
            if isinstance(value := getattr(self, name), dict | bool):
                object.__setattr__(self, name, _text(value, self.origin))
        if isinstance(self.choice, list):
            object.__setattr__(self, "choice", tuple(self.choice))
        kinds = [kind for kind in KINDS if getattr(self, kind) not in (None, False)]
        if len(kinds) != 1 and not self.free:
            found = f"found {', '.join(kinds)}" if kinds else "found none"
            raise RequestError(f"{self.origin} must hold exactly one of {', '.join(KINDS)}; {found}", param=self.origin)
        self._check_types()

    def _check_types(self) -> None:
        for name in ("json", "regex", "grammar", "structural_tag", "whitespace_pattern"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise RequestError(f"{self.origin}.{name} is {type(value).__name__}; it must be a text", param=self.origin)
            if value is not None and len(value) > MAX_SOURCE:
                raise RequestError(f"{self.origin}.{name} has {len(value)} characters; there may be {MAX_SOURCE}", param=self.origin)
        for name in ("json_object", "disable_any_whitespace", "disable_additional_properties"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, bool):
                raise RequestError(f"{self.origin}.{name} is {type(value).__name__}; it must be true or false", param=self.origin)
        if self.choice is not None:
            if not isinstance(self.choice, tuple) or not self.choice or not all(isinstance(text, str) and text for text in self.choice):
                raise RequestError(f"{self.origin}.choice must be a list of texts, none of them empty", param=self.origin)
            if sum(map(len, self.choice)) > MAX_SOURCE:
                raise RequestError(f"{self.origin}.choice has more than {MAX_SOURCE} characters", param=self.origin)

    @property
    def grace(self) -> int:
        """How many tokens of output may be any before there is something to say about one."""
        return (self.thinking.budget or 0) if self.free and self.thinking is not None else 0

    @property
    def kind(self) -> Kind:
        return next(kind for kind in KINDS if getattr(self, kind) not in (None, False))

    @classmethod
    def of(cls, given: Mapping[str, Any], origin: str = "structured_outputs") -> StructuredOutputsParams:
        """From a request's object. Raises `RequestError` for a key that there is not, or a value of a wrong type."""
        known = {field.name for field in fields(cls)} - {"thinking", "free", "origin"}
        for name in given:
            if name not in known:
                raise RequestError(f"{origin} has no key {name!r}; it has {', '.join(sorted(known))}", param=origin)
        return cls(**given, origin=origin)


def _text(value: Any, origin: str) -> str:
    try:
        return json_text.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"{origin} is no JSON: {error}", param=origin) from error


Backend = Literal["auto", "xgrammar", "guidance"]
BACKENDS: tuple[Backend, ...] = ("auto", "xgrammar", "guidance")


@dataclass(frozen=True)
class StructuredOutputsConfig:
    """`--structured-outputs-config`: `backend` compiles grammars; what `disable_…` says holds for every request; `enable_in_reasoning`
    binds what is thought before the output too."""

    backend: Backend = "auto"
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    enable_in_reasoning: bool = False

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise ConfigError(f"structured_outputs_config: backend {self.backend!r} is not one of {', '.join(BACKENDS)}")
        for name in ("disable_any_whitespace", "disable_additional_properties", "enable_in_reasoning"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"structured_outputs_config: {name}={getattr(self, name)!r} must be true or false")


def structured_of(given: Mapping[str, Any] | None) -> StructuredOutputsConfig:
    """The record of a configuration. Raises `ConfigError` that names the key or value."""
    known = [field.name for field in fields(StructuredOutputsConfig)]
    for name in given or {}:
        if name not in known:
            raise ConfigError(f"structured_outputs_config has no key {name!r}; it has {', '.join(known)}")
    return StructuredOutputsConfig(**(given or {}))
