"""Which family serves a configuration: by architecture, then by model type; plugins join through the entry-point group `pagoda.models`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from pkgutil import iter_modules
from typing import Any

from pagoda.hal.errors import ModelError
from pagoda.models import families as built_in
from pagoda.models.conversion import AS_IT_IS, Wanted, as_asked, pooling_family
from pagoda.models.family import Family

GROUP = "pagoda.models"


def _built_in() -> Iterator[Family]:
    for module in iter_modules(built_in.__path__, f"{built_in.__name__}."):
        for value in vars(import_module(module.name)).values():
            yield from (one for one in (value if isinstance(value, tuple) else (value,)) if isinstance(one, Family))


BUILT_IN = tuple(dict.fromkeys(_built_in()))
"""Every family that a module of `models/families` names, by the module's name."""


@cache
def families() -> tuple[Family, ...]:
    """Every family here, plugins' first: each entry point is a callable that returns families."""
    return (*(family for point in entry_points(group=GROUP) for family in point.load()()), *BUILT_IN)


def tasks_of(architecture: str, model_type: str) -> tuple[str, ...] | None:
    """What an architecture is asked for; None where no family serves it."""
    known = next((family for family in families() if architecture in family.architectures), None)
    if known is not None and not known.pools:
        return ("generate",)
    if known is None and pooling_family(architecture, {"model_type": model_type}, families()) is None:
        return None
    return pooled_tasks(architecture)


def bridged_tasks(architecture: str) -> tuple[str, ...]:
    """The same of an architecture that transformers runs."""
    generates = architecture.endswith(("LMHeadModel", "ForCausalLM", "ForConditionalGeneration", "WithLMHead"))
    pools = architecture.endswith(("Model", "Classification", "Encoder"))
    return pooled_tasks(architecture) if pools and not generates else ("generate",)


def pooled_tasks(architecture: str) -> tuple[str, ...]:
    """Of one that answers with vectors or scores."""
    ends = {"ForSequenceClassification": "classify", "ForTokenClassification": "token_classify", "RewardModel": "token_classify"}
    return next(((task,) for end, task in ends.items() if architecture.endswith(end)), ("embed",))


def find_family(config: Mapping[str, Any], wanted: Wanted = AS_IT_IS) -> Family:
    """The family of a config.json, in the use that is `wanted`. Raises `ModelError` naming what it asks for and what is here."""
    return as_asked(_family(config), config, wanted)


def _family(config: Mapping[str, Any]) -> Family:
    architectures, model_type = tuple(config.get("architectures") or ()), config.get("model_type")
    for name in architectures:
        for family in families():
            if name in family.architectures:
                return family
    for name in architectures:
        if (found := pooling_family(name, config, families())) is not None:
            return found
    if not architectures:
        for family in families():
            if model_type in family.model_types:
                return family
    known = ", ".join(sorted(name for family in families() for name in family.architectures))
    asked = ", ".join(architectures) or f"model_type {model_type!r}"
    raise ModelError(f"no model family serves {asked}; there are {known}; a plugin can add one under the entry-point group {GROUP}")
