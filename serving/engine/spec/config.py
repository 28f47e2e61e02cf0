"""`--speculative-config`: a method and its settings, under vLLM's names. One record a method; wrong ones are refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

from pagoda.hal.errors import ConfigError

MOST_DRAFTS = 63
"""Drafts of one row and step; what each sees of the others is a number of 64 bits."""


@dataclass(frozen=True)
class Ngram:
    """Tokens that followed the last occurrence of a sequence's newest `prompt_lookup_max` … `prompt_lookup_min` tokens."""

    num_speculative_tokens: int
    prompt_lookup_max: int = 5
    prompt_lookup_min: int = 5

    def __post_init__(self) -> None:
        _check_count(self.num_speculative_tokens)
        if not 1 <= self.prompt_lookup_min <= self.prompt_lookup_max:
            raise ConfigError(
                f"speculative_config: prompt_lookup_min={self.prompt_lookup_min} must be from 1 to"
                f" prompt_lookup_max={self.prompt_lookup_max}"
            )


@dataclass(frozen=True)
class Mtp:
    """Tokens that the model's own layer for several tokens guesses (multi-token prediction), where the checkpoint has one."""

    num_speculative_tokens: int

    def __post_init__(self) -> None:
        _check_count(self.num_speculative_tokens)


Speculation = Ngram | Mtp
"""What `speculation_of` gives."""

METHODS: dict[str, type[Ngram] | type[Mtp]] = {"ngram": Ngram, "mtp": Mtp}


def speculation_of(given: Mapping[str, Any] | None) -> Speculation | None:
    """The record of a configuration, None where there is none. Raises `ConfigError` that names the method, key or value."""
    if not given:
        return None
    method = given.get("method")
    if method not in METHODS:
        raise ConfigError(f"speculative_config: method {method!r} is not one of {', '.join(METHODS)}; name one of them, or leave it out")
    kind, values = METHODS[method], {name: value for name, value in given.items() if name != "method" and value is not None}
    allowed = {field.name: field.default for field in fields(kind)}
    for name in values:
        if name not in allowed:
            raise ConfigError(f"speculative_config: method {method} has no key {name!r}; it has {', '.join(allowed)}")
    missing = next((name for name, default in allowed.items() if default is MISSING and name not in values), None)
    if missing is not None:
        raise ConfigError(f"speculative_config: method {method} needs {missing!r}")
    _check_numbers(values)
    return kind(**_both_lookups(values))


def _both_lookups(values: dict[str, Any]) -> dict[str, Any]:
    """One of the two lengths alone is both."""
    ends = {name: values[name] for name in ("prompt_lookup_min", "prompt_lookup_max") if name in values}
    if len(ends) != 1:
        return values
    (length,) = ends.values()
    return values | {"prompt_lookup_min": length, "prompt_lookup_max": length}


def _check_numbers(values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"speculative_config: {name}={value!r} must be a whole number")


def _check_count(count: int) -> None:
    if not 1 <= count <= MOST_DRAFTS:
        raise ConfigError(f"speculative_config: num_speculative_tokens={count} must be from 1 to {MOST_DRAFTS}")
