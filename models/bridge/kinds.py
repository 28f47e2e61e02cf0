"""Which class of transformers a configuration names, and what it answers with: tokens, vectors, or scores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pagoda.hal.errors import ConfigError, ModelError
from pagoda.models.bridge.module import transformers
from pagoda.models.bridge.spec import Answers
from pagoda.models.config import Config
from pagoda.models.conversion import CAUSAL, Wanted, settled
from pagoda.models.families.pooled import labels, score_activation
from pagoda.models.pooling import Pooler

ENDS: Mapping[str, Answers] = {"ForSequenceClassification": "scores", "ForTokenClassification": "token_scores"}
BARE = ("Model", "EncoderModel", "ForMaskedLM", "ForPreTraining", "PreTrainedModel")
"""How architectures end whose hidden states are all that they are asked for."""


def answers_of(config: Mapping[str, Any], wanted: Wanted) -> Answers:
    """By the architecture's name, unless the user says otherwise. Raises `ConfigError` where both do not go together."""
    name = next(iter(config.get("architectures") or ()), "")
    named = next((answers for end, answers in ENDS.items() if name.endswith(end)), None)
    if named is None:
        bare = name.endswith(BARE) and not name.endswith((*CAUSAL, "EncoderDecoderModel"))
        pools = wanted.runner == "pooling" or wanted.convert in ("embed", "classify") or bare
        named = ("scores" if wanted.convert == "classify" else "vectors") if pools else "tokens"
    if wanted.runner == "generate" and named != "tokens":
        raise ConfigError(f"{name} answers with vectors or scores and cannot generate; leave --runner at auto")
    return named


def bridged_class(config: Mapping[str, Any], answers: Answers = "tokens") -> Any:
    """The model class that a config.json names. Raises `ModelError` where there is none."""
    package = transformers()
    model_type = config.get("model_type")
    if model_type not in package.CONFIG_MAPPING:
        raise ModelError(f"transformers {package.__version__} has no model type {model_type!r}")
    classes = _classes(package, package.CONFIG_MAPPING[model_type], answers)
    what = {"tokens": "causal language model", "vectors": "plain model", "scores": "classifier", "token_scores": "token classifier"}[
        answers
    ]
    if not classes:
        raise ModelError(f"transformers {package.__version__} has no {what} for model type {model_type!r}")
    architectures = tuple(config.get("architectures") or ())
    named = [one for one in classes if one.__name__ in architectures]
    if answers == "tokens" and architectures and not named:
        raise ModelError(f"{', '.join(architectures)} is no {what}: of {model_type!r} there is {classes[0].__name__}")
    return named[0] if named else classes[0]


def pooler_of(config: Mapping[str, Any], answers: Answers, wanted: Wanted) -> Pooler | None:
    """What the engine makes of a module's rows: hidden states, or scores that stand in every row of their text."""
    reader = Config(config)
    if answers == "tokens":
        return None
    if answers == "vectors":
        return settled(Pooler("embed", "mean", normalize=True), reader, wanted)
    named = labels(reader)
    kind: Literal["all", "last"] = "all" if answers == "token_scores" else "last"
    return settled(Pooler("classify", kind, activation=score_activation(reader, len(named)), labels=named), reader, wanted)


_GENERATE = ("CausalLM", "ImageTextToText", "MultimodalLM", "Seq2SeqLM", "SpeechSeq2Seq")


def _classes(package: Any, kind: Any, answers: Answers) -> list[Any]:
    """Of a configuration's class; of those that answer with tokens, to text first, then to images and text, then after an encoder."""
    autos = {
        "tokens": tuple(getattr(package, f"AutoModelFor{name}") for name in _GENERATE),
        "vectors": (package.AutoModelForTextEncoding, package.AutoModel),
        "scores": (package.AutoModelForSequenceClassification,),
        "token_scores": (package.AutoModelForTokenClassification,),
    }[answers]
    found = [auto._model_mapping[kind] for auto in autos if kind in auto._model_mapping]
    return [one for each in found for one in (each if isinstance(each, tuple) else (each,))]
