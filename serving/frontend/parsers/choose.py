"""Which parsers a model's answers get: by name, or by what its chat template says. Strangers' come from entry points."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from importlib.util import module_from_spec, spec_from_file_location
from typing import Literal

from pagoda.hal.errors import ConfigError
from pagoda.serving.frontend.parsers.events import NO_HINTS, Family, Hints
from pagoda.serving.frontend.parsers.gemma import FUNCTION_GEMMA, GEMMA4, GEMMA4_REASONING
from pagoda.serving.frontend.parsers.granite import GRANITE, GRANITE_REASONING
from pagoda.serving.frontend.parsers.harmony import HARMONY, HARMONY_REASONING
from pagoda.serving.frontend.parsers.hermes import HERMES
from pagoda.serving.frontend.parsers.json_kin import (
    APERTUS,
    APERTUS_REASONING,
    COHERE,
    COHERE4_REASONING,
    COHERE_REASONING,
    ERNIE_REASONING,
    GIGACHAT,
    HUNYUAN_REASONING,
    INTERNLM,
    JAMBA,
    LONGCAT,
    LONGCAT_REASONING,
    MINIMAX3_REASONING,
    NEMOTRON,
    PLAMO_REASONING,
    SEED_REASONING,
    XLAM,
)
from pagoda.serving.frontend.parsers.kimi_k3 import KIMI3, KIMI3_REASONING
from pagoda.serving.frontend.parsers.llama import JSON, LLAMA3
from pagoda.serving.frontend.parsers.messages import INKLING, INKLING_REASONING, MUSE, MUSE_REASONING
from pagoda.serving.frontend.parsers.minimax_m3 import MINIMAX3
from pagoda.serving.frontend.parsers.mistral import MISTRAL, MISTRAL_REASONING
from pagoda.serving.frontend.parsers.pairs import GLM, HORIZON, HORIZON_THOUGHTS, HUNYUAN3, HUNYUAN4, HUNYUAN_THOUGHTS
from pagoda.serving.frontend.parsers.phi import PHI
from pagoda.serving.frontend.parsers.pythonic import LFM2, OLMO3, PYTHONIC
from pagoda.serving.frontend.parsers.sections import DEEPSEEK, KIMI, PLAMO
from pagoda.serving.frontend.parsers.tagged import (
    DEEPSEEK_V4,
    DEEPSEEK_V32,
    DEEPSEEK_V41,
    DOTS,
    MIMO,
    MINICPM5,
    MINIMAX,
    QWEN_CODER,
    SEED,
    STEP3,
)
from pagoda.serving.frontend.parsers.template import HF, HF_THOUGHTS
from pagoda.serving.frontend.parsers.thinking import APPEND_THINK, DEEPSEEK_THOUGHTS, KIMI_THOUGHTS, THINK

GROUP = "pagoda.parsers"
"""Entry points; each is a `Family`."""

BUILT_IN = (
    *(HARMONY, MUSE, INKLING, KIMI3, MINIMAX3, HORIZON, PLAMO, GIGACHAT, DOTS, DEEPSEEK_V4, DEEPSEEK_V41, DEEPSEEK_V32, HUNYUAN3, HUNYUAN4),
    *(GEMMA4, FUNCTION_GEMMA, COHERE, INTERNLM, LONGCAT, NEMOTRON, APERTUS, KIMI, STEP3, SEED, MINIMAX, GLM, MINICPM5),
    *(DEEPSEEK, MISTRAL, PHI, GRANITE, LLAMA3, LFM2, OLMO3, JAMBA, PYTHONIC, QWEN_CODER, HERMES, MIMO, JSON, XLAM, HF),
    *(HARMONY_REASONING, MUSE_REASONING, INKLING_REASONING, KIMI3_REASONING, MINIMAX3_REASONING, HORIZON_THOUGHTS, PLAMO_REASONING),
    *(DEEPSEEK_THOUGHTS, HUNYUAN_THOUGHTS, GEMMA4_REASONING, COHERE4_REASONING, COHERE_REASONING, HUNYUAN_REASONING, ERNIE_REASONING),
    *(SEED_REASONING, LONGCAT_REASONING, APERTUS_REASONING, MISTRAL_REASONING, GRANITE_REASONING, KIMI_THOUGHTS, THINK, APPEND_THINK),
    HF_THOUGHTS,
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


def choose(kind: Kind, wanted: str, template: str, plugin: str | None = None, hints: Hints = NO_HINTS) -> Family | None:
    """The family for a flag's value and a checkpoint's templates; None is no parser.

    Args:
        plugin: a Python file with further ones. hints: what the checkpoint's tokenizer says, by which some families spell their marks.

    `auto` goes by the template, then by the tokenizer's own description; what shows tools in a way that none of ours has gets plain JSON.
    Raises `ConfigError` for a name that there is not.
    """
    found = None if wanted == "none" else _find(kind, wanted, template, plugin, hints)
    return found.fitted(hints) if found is not None and found.fitted is not None else found


def _find(kind: Kind, wanted: str, template: str, plugin: str | None, hints: Hints) -> Family | None:
    known = families(kind, plugin)
    if wanted == "auto":
        found = next((family for family in known if family.signed(template)), None)
        field = "tool_calls" if kind == "tools" else "thinking"
        if found is None and hints.response is not None and field in hints.response.get("fields", {}):
            return HF if kind == "tools" else HF_THOUGHTS
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
