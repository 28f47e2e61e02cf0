"""Which parsers a model's answers get: by name, or by what its chat template says. Strangers' come from entry points."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from importlib.util import module_from_spec, spec_from_file_location
from typing import Literal

from pagoda.hal.errors import ConfigError
from pagoda.serving.frontend.parsers.events import Family
from pagoda.serving.frontend.parsers.gemma import FUNCTION_GEMMA, GEMMA4, GEMMA4_REASONING
from pagoda.serving.frontend.parsers.glm import GLM
from pagoda.serving.frontend.parsers.granite import GRANITE, GRANITE_REASONING
from pagoda.serving.frontend.parsers.harmony import HARMONY, HARMONY_REASONING
from pagoda.serving.frontend.parsers.hermes import HERMES
from pagoda.serving.frontend.parsers.json_kin import (
    APERTUS,
    APERTUS_REASONING,
    COHERE,
    COHERE_REASONING,
    ERNIE_REASONING,
    HUNYUAN_REASONING,
    INTERNLM,
    JAMBA,
    LONGCAT,
    LONGCAT_REASONING,
    NEMOTRON,
    SEED_REASONING,
    XLAM,
)
from pagoda.serving.frontend.parsers.llama import JSON, LLAMA3
from pagoda.serving.frontend.parsers.mistral import MISTRAL, MISTRAL_REASONING
from pagoda.serving.frontend.parsers.phi import PHI
from pagoda.serving.frontend.parsers.pythonic import LFM2, OLMO3, PYTHONIC
from pagoda.serving.frontend.parsers.sections import DEEPSEEK, KIMI
from pagoda.serving.frontend.parsers.tagged import DEEPSEEK_V32, MINIMAX, QWEN_CODER, SEED, STEP3
from pagoda.serving.frontend.parsers.thinking import THINK

GROUP = "pagoda.parsers"
"""Entry points; each is a `Family`."""

BUILT_IN = (
    *(HARMONY, GEMMA4, FUNCTION_GEMMA, COHERE, INTERNLM, LONGCAT, NEMOTRON, APERTUS, KIMI, DEEPSEEK_V32, STEP3, SEED, MINIMAX, GLM),
    *(DEEPSEEK, MISTRAL, PHI, GRANITE, LLAMA3, LFM2, OLMO3, JAMBA, PYTHONIC, QWEN_CODER, HERMES, JSON, XLAM),
    *(HARMONY_REASONING, GEMMA4_REASONING, COHERE_REASONING, HUNYUAN_REASONING, ERNIE_REASONING, SEED_REASONING, LONGCAT_REASONING),
    *(APERTUS_REASONING, MISTRAL_REASONING, GRANITE_REASONING, THINK),
)
"""The first whose sign a template holds is taken: families with rarer signs stand before those with common ones."""

Kind = Literal["tools", "reasoning"]
_FLAGS: dict[Kind, str] = {"tools": "--tool-call-parser", "reasoning": "--reasoning-parser"}


def families(kind: Kind, plugin: str | None = None) -> tuple[Family, ...]:
    """Strangers' first, so that they can replace ours: those of the file, then those installed. Raises `ConfigError` naming the one that
    does not load."""
    found = [] if plugin is None else _of_file(plugin, kind)
    strangers = [*found, *(_load(point) for point in sorted(entry_points(group=GROUP)))]
    return tuple(family for family in (*strangers, *BUILT_IN) if family.kind == kind)


def choose(kind: Kind, wanted: str, template: str, plugin: str | None = None) -> Family | None:
    """The family for a flag's value and a checkpoint's templates; None is no parser. `plugin`: a Python file with further ones.

    `auto` goes by the template; one that shows tools in a way that none of ours claims gets plain JSON.
    Raises `ConfigError` for a name that there is not.
    """
    if wanted == "none":
        return None
    known = families(kind, plugin)
    if wanted == "auto":
        found = next((family for family in known if any(sign in template for sign in family.signs)), None)
        return found or (JSON if kind == "tools" and "tools" in template else None)
    for family in known:
        if wanted in family.names:
            return family
    names = ", ".join(sorted(name for family in known for name in family.names))
    raise ConfigError(f"{_FLAGS[kind]} {wanted!r} is not here; there is auto, none, {names}")


def _of_file(path: str, kind: Kind) -> list[Family]:
    flag = f"--{'tool' if kind == 'tools' else 'reasoning'}-parser-plugin"
    spec = spec_from_file_location(f"pagoda_{kind}_plugin", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{flag} {path} is no Python file; give one that holds `Family` records")
    module = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever the file does
        raise ConfigError(f"{flag} {path} failed to load: {error!r}; repair it") from error
    found = [value for value in vars(module).values() if isinstance(value, Family) and value.kind == kind and value not in BUILT_IN]
    if not found:
        raise ConfigError(f"{flag} {path} holds no Family of kind {kind!r}; see pagoda.serving.frontend.parsers.events")
    return found


def _load(point: EntryPoint) -> Family:
    try:
        family = point.load()
    except Exception as error:
        raise ConfigError(f"parser plugin {point.name!r} ({point.value}) failed to load: {error!r}; uninstall or repair it") from error
    if not isinstance(family, Family):
        raise ConfigError(f"parser plugin {point.name!r} ({point.value}) is no Family but {type(family).__name__}; uninstall or repair it")
    return family
