"""Models that answer with vectors or scores made of those that answer with tokens: which family, and what pools its hidden states."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from pagoda.hal.errors import ConfigError, ModelError
from pagoda.models.checkpoint import Also, Rename, Rule
from pagoda.models.config import Config
from pagoda.models.families.common import bidirectional
from pagoda.models.families.pooled import NO_HEAD, labels, score_activation
from pagoda.models.family import Family
from pagoda.models.loading.sentence_transformers import KEY
from pagoda.models.pooling import Dense, Pooler
from pagoda.models.spec import DecoderSpec

Runner = Literal["auto", "generate", "pooling"]
Convert = Literal["auto", "none", "embed", "classify"]


@dataclass(frozen=True)
class Wanted:
    """What the user asks of a model: `--runner`, `--convert`, `--pooler-config`."""

    runner: Runner = "auto"
    convert: Convert = "auto"
    pooler: Mapping[str, Any] = field(default_factory=dict)


AS_IT_IS = Wanted()

Make = Callable[[Config], Pooler]

CAUSAL = ("ForCausalLM", "LMHeadModel")


def _vectors(config: Config) -> Pooler:
    return Pooler("embed", "last", normalize=True)


def _scores(config: Config, kind: Literal["last", "all"] = "last") -> Pooler:
    named = labels(config)
    steps = (Dense(len(named), bias=kind == "all"),)
    return Pooler("classify", kind, steps, activation=score_activation(config, len(named)), labels=named)


def _reward(config: Config, outputs: int = 1) -> Pooler:
    """Of an answer, or (two) of each of its steps: how likely it is wrong, and right."""
    steps = (Dense(config.integer("hidden_size"), "relu"), Dense(outputs))
    return Pooler("classify", "all", steps, activation="none" if outputs == 1 else "softmax")


ENDS: Mapping[str, Make] = {
    "ForSequenceClassification": _scores, "ForTokenClassification": partial(_scores, kind="all"),
    "ForProcessRewardModel": partial(_reward, outputs=2), "ForRewardModel": _reward, "TextModel": _vectors, "Model": _vectors,
}  # fmt: skip
"""How architectures that pool end, and what they answer with."""


def pooling_family(architecture: str, config: Mapping[str, Any], families: Iterable[Family]) -> Family | None:
    """The family of an architecture that is a causal one's in another use (`Qwen3Model`, `LlamaForSequenceClassification`); or None, as
    for models of text and images, whose configurations hold a text model's."""
    if "text_config" in config:
        return None
    for end, make in ENDS.items():
        if architecture.endswith(end) and not architecture.endswith(CAUSAL):
            stem = architecture.removesuffix(end)
            base = _base(stem, config, families)
            return converted(base, make, (architecture,)) if base is not None else None
    return None


def _base(stem: str, config: Mapping[str, Any], families: Iterable[Family]) -> Family | None:
    wanted = {stem + end for end in CAUSAL}
    known = list(families)
    named = next((family for family in known if wanted & set(family.architectures)), None)
    return named or next((family for family in known if config.get("model_type") in family.model_types and not family.pools), None)


def as_asked(family: Family, config: Mapping[str, Any], wanted: Wanted) -> Family:
    """The family, pooling where the user or the checkpoint's own modules say so, with the settings of both.

    Raises `ConfigError` where what is asked for does not go together.
    """
    pools = is_pooling(family)
    if wanted.runner == "generate" or (wanted.convert == "none" and not pools):
        if pools or wanted.pooler:
            raise ConfigError("this model answers with vectors or scores and cannot generate; leave --runner at auto")
        return family
    asked = wanted.runner == "pooling" or wanted.convert in ("embed", "classify") or bool(wanted.pooler)
    if not pools and not asked and KEY not in config:
        return family
    if not pools:
        family = converted(family, _scores if wanted.convert == "classify" else _vectors, family.architectures)
    elif wanted.convert == "classify":
        raise ConfigError("--convert classify makes a scorer of a generator; this model already pools")
    return replace(
        family,
        spec=lambda reader: _with_settings(family.spec(reader), reader, wanted),
        rules=lambda spec: (*family.rules(spec), Rename(f"{KEY}.{{i}}.{{t}}", "pooler.{i}.{t}")),
    )


def is_pooling(family: Family) -> bool:
    """Whether its models answer with vectors or scores as they are."""
    return family.pools


def converted(base: Family, make: Make, architectures: tuple[str, ...]) -> Family:
    """A family of generators whose hidden states are pooled; its head is left out."""

    def spec(config: Config) -> DecoderSpec:
        made = base.spec(config)
        config.ignore("tie_word_embeddings", "is_causal")
        if config.values.get("is_causal") is False or architectures[0].startswith("LlamaBidirectional"):
            made = bidirectional(made)
        return replace(made, head=NO_HEAD, pooler=make(config))

    def rules(spec: DecoderSpec) -> tuple[Rule, ...]:
        own = base.rules(replace(spec, head=NO_HEAD))
        return (*_score_rules(spec), *_bare(own), *own)

    return Family(base.name, architectures, base.model_types, spec, rules, pools=True)


def _bare(own: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """Bare models are stored without the prefix that they have below a head, and that a family's `own` rules speak of."""
    spoken = str(own)
    used = {prefix: names for prefix, names in _PREFIXES.items() if f"'{prefix}." in spoken}
    return tuple(Also(f"{name}.{{x*}}", f"{prefix}.{name}.{{x*}}") for prefix, names in used.items() for name in names)


_PREFIXES = {"model": ("embed_tokens", "layers", "norm"), "transformer": ("h", "wte", "wpe", "ln_f")}


def _score_rules(spec: DecoderSpec) -> tuple[Rule, ...]:
    assert spec.pooler is not None
    if spec.pooler.task == "embed":
        return ()
    if len(spec.pooler.steps) > 1:
        return (Rename("score.0.{t}", "pooler.0.{t}"), Rename("score.2.{t}", "pooler.1.{t}"))
    return (Rename("score.{t}", "pooler.0.{t}"), Rename("classifier.{t}", "pooler.0.{t}"))


def _with_settings(spec: DecoderSpec, config: Config, wanted: Wanted) -> DecoderSpec:
    assert spec.pooler is not None
    modules, longest = config.values.get(KEY), spec.max_positions
    if modules is not None and spec.pooler.task == "embed":
        longest = min(longest, modules["max_tokens"] or longest)
    return replace(spec, pooler=settled(spec.pooler, config, wanted), max_positions=longest)


def settled(pooler: Pooler, config: Config, wanted: Wanted) -> Pooler:
    """The pooler with what the checkpoint's own modules say, and the user above them. Raises `ConfigError`, `ModelError`."""
    modules = config.values.get(KEY)
    config.ignore(KEY)
    if modules is not None and pooler.task == "embed":
        dense = tuple(_dense(values) for values in modules["dense"])
        pooler = replace(pooler, kind=modules["pooling"] or "all", normalize=modules["normalize"], steps=dense)
    return _overridden(pooler, wanted.pooler)


def _dense(values: Mapping[str, Any]) -> Dense:
    named = str(values.get("activation_function") or "Identity").rpartition(".")[2]
    known = {"Identity": None, "Tanh": "tanh", "GELU": "gelu", "ReLU": "relu", "Sigmoid": "sigmoid", "SiLU": "silu"}
    if named not in known:
        raise ModelError(f"a projection's activation {named!r} is not implemented; known: {', '.join(known)}")
    return Dense(int(values["out_features"]), known[named], bool(values.get("bias", True)))


_KINDS: Mapping[str, Any] = {"CLS": "cls", "LAST": "last", "MEAN": "mean", "ALL": "all", "STEP": "all"}
_SETTINGS = ("pooling_type", "seq_pooling_type", "tok_pooling_type", "normalize", "use_activation", "activation", "softmax", "step_tag_id",
             "returned_token_ids")  # fmt: skip


def _overridden(pooler: Pooler, given: Mapping[str, Any]) -> Pooler:
    unknown = sorted(given.keys() - set(_SETTINGS))
    if unknown:
        raise ConfigError(f"--pooler-config has {', '.join(unknown)}; known: {', '.join(_SETTINGS)}")
    kind = next((given[name] for name in _SETTINGS[:3] if given.get(name) is not None), None)
    if kind is not None and str(kind).upper() not in _KINDS:
        raise ConfigError(f"--pooler-config: pooling type {kind!r} is not one of {', '.join(_KINDS)}")
    raw = any(given.get(name) is False for name in ("use_activation", "activation", "softmax"))
    return replace(
        pooler,
        kind=_KINDS[str(kind).upper()] if kind is not None else pooler.kind,
        normalize=bool(given.get("normalize", pooler.normalize and not raw)),
        activation="none" if raw else pooler.activation,
        step_tag=given.get("step_tag_id", pooler.step_tag),
        returned=tuple(given.get("returned_token_ids") or pooler.returned),
    )
