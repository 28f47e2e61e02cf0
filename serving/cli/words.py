"""Options that several commands share: the model as first word, and sampling settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any

from pagoda.hal.errors import ConfigError
from pagoda.serving.engine.config import Flag


@dataclass(frozen=True)
class SamplingOptions:
    """How tokens are chosen; what is not given is the model's own."""

    max_tokens: Annotated[int | None, Flag("Most tokens of an answer.", section="Sampling")] = None
    temperature: Annotated[float | None, Flag("0 always takes the likeliest token.", ("-t",))] = None
    top_p: Annotated[float | None, Flag("Choose among the likeliest tokens that make up this share.")] = None
    top_k: Annotated[int | None, Flag("Choose among this many tokens.")] = None
    min_p: Annotated[float | None, Flag("Choose among tokens with at least this share of the likeliest one's chance.")] = None
    stop: Annotated[tuple[str, ...], Flag("Text that ends the answer.", metavar="TEXT")] = ()


def with_model(values: dict[str, Any]) -> dict[str, Any]:
    """The values, their first word taken as the model. Raises `ConfigError` when `--model` names another one."""
    words = values.pop("words", [])
    if not words:
        return values
    if values.get("model", words[0]) != words[0]:
        raise ConfigError(f"two models are named: {words[0]!r} and --model {values['model']!r}; name one")
    return values | {"model": words[0]}


def sampling_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `SamplingParams`' settings that were given; the engine's seed is also the request's."""
    names = [*(f.name for f in fields(SamplingOptions)), "seed"]
    return {name: values[name] for name in names if values.get(name) is not None}
