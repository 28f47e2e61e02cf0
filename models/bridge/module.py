"""A module of transformers without weights, and the part of it that gives hidden states."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import Any

import torch
from pagoda.hal.errors import ModelError

EXPERTS = "batched_mm"
"""How transformers' experts are computed: the way whose shapes do not depend on which experts the tokens chose."""

Module = Any
"""A `PreTrainedModel`."""

EXTENDS = "embed_tokens_extend"
"""What some language models call their own part that sees and hears: it changes the embeddings of a text's tokens."""

ONE_AT_A_TIME = Lock()
"""While transformers builds a module it changes things that all threads share; ranks may be threads of one process."""


def transformers() -> Any:
    """The package. Raises `ModelError` where it is not installed."""
    try:
        import transformers as package
    except ImportError as error:
        raise ModelError("models without a family here need the package transformers: pip install transformers") from error
    return package


def read_config(config: Mapping[str, Any]) -> Any:
    """The `PreTrainedConfig` of a config.json. Raises `ModelError` for values that transformers refuses."""
    kind = transformers().CONFIG_MAPPING[config["model_type"]]
    try:
        return kind.from_dict({key: value for key, value in config.items() if key != "quantization_config"})
    except Exception as error:  # whatever a configuration class raises
        raise ModelError(f"transformers refuses this configuration: {error}") from error


def hollow_module(kind: Any, config: Mapping[str, Any], dtype: str, attention: str | None) -> Module:
    """A module of class `kind` with parameters that have shapes and no numbers. attention: None leaves it to transformers."""
    with ONE_AT_A_TIME, torch.device("meta"):
        try:
            asked = {} if attention is None else {"attn_implementation": "eager"}
            module = kind._from_config(read_config(config), dtype=getattr(torch, dtype), **asked)
        except ModelError:
            raise
        except Exception as error:  # whatever a model class raises
            raise ModelError(f"transformers cannot build {kind.__name__}: {type(error).__name__}: {error}") from error
    for part in module.modules() if attention is not None else ():
        if isinstance(part, transformers().PreTrainedModel):
            part.config._attn_implementation_internal = attention
    choose_experts(module)
    module.tie_weights()
    return module.eval()


def choose_experts(module: Module) -> None:
    """Have experts computed without looking at what the tokens chose, where the model leaves the choice."""
    for part in module.modules():
        if isinstance(part, transformers().PreTrainedModel) and part._can_set_experts_implementation():
            part.set_experts_implementation(EXPERTS)


def body_paths(module: Module) -> tuple[tuple[str, str], ...]:
    """Where hidden states may come from, and what gives the head the same, the likelier first."""
    prefix = module.base_model_prefix
    names = (f"{prefix}.decoder", prefix, "model.decoder", "model", "transformer")
    inner = [(f"{top}.{name}", top) for top in (prefix, "model") for name in ("language_model", "text_model") if top]
    own = ("language_model.model.decoder", "language_model.model", "language_model.backbone", "text_model.model")
    inner += [(name, name) for name in own]
    paths = dict.fromkeys((*inner, *((name, name) for name in names if name)))
    return tuple((body, top) for body, top in paths if _has(module, body))


def _has(module: Module, path: str) -> bool:
    for name in path.split("."):
        module = getattr(module, name, None)
    return isinstance(module, torch.nn.Module)


class Output(tuple):  # type: ignore[type-arg]
    """What a body returns, as far as a head may ask: the hidden states, and None for all else by name."""

    @property
    def last_hidden_state(self) -> torch.Tensor:
        hidden: torch.Tensor = self[0]
        return hidden

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class Given(torch.nn.Module):
    """Stands where the body stood, and gives hidden states that are there already."""

    hidden: torch.Tensor

    def forward(self, *_: Any, **__: Any) -> Any:
        return Output((self.hidden,))


@contextmanager
def replaced(module: Module, path: str, other: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """`other` in the place of the submodule at `path`, which is given."""
    parent, _, name = path.rpartition(".")
    owner = module.get_submodule(parent)
    old = owner.get_submodule(name)
    setattr(owner, name, other)
    try:
        yield old
    finally:
        setattr(owner, name, old)


def attend_by(module: Module, body: str, name: str) -> None:
    """Have the language model at `body` go by one entry of the attention interface; what stands before it keeps an attention of its own."""
    names, base = body.split("."), transformers().PreTrainedModel
    above = [module.get_submodule(".".join(names[:depth])) for depth in range(len(names))]
    own = (part for name, part in module.get_submodule(body).named_modules() if not name.startswith(EXTENDS))
    ours = {id(part.config) for part in (*above, *own) if hasattr(part, "config")}
    for part in module.modules():
        if isinstance(part, base):
            # Without a mask torch's own attention takes a module at its word, and some that see say that they are causal.
            causal = any(getattr(inner, "is_causal", False) for inner in part.modules())
            other = "sdpa" if part._supports_sdpa and not causal else "eager"
            part.config._attn_implementation_internal = name if id(part.config) in ours else other


def own_hidden(module: Module, body: str, ids: Sequence[int], name: str) -> torch.Tensor:
    """Hidden states `[T, width]` of one text by transformers' own attention: what ours, the entry `name`, is held against."""
    attend_by(module, body, "eager")
    try:
        there = next(module.parameters()).device
        text = torch.tensor([ids], device=there)
        hidden: torch.Tensor = module.get_submodule(body)(input_ids=text, use_cache=False).last_hidden_state[0]
    finally:
        attend_by(module, body, name)
    return hidden
