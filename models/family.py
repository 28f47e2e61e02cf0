"""A family: the architectures it serves, how their configuration becomes a spec, how their tensors are called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pagoda.hal.errors import ModelError
from pagoda.models.checkpoint import Rule
from pagoda.models.config import Config
from pagoda.models.spec import DecoderSpec

Rules = Callable[[DecoderSpec], tuple[Rule, ...]]


class LeftToTransformers(ModelError):
    """A family read a configuration and lacks what it asks for, but knows that transformers' own module has it."""


@dataclass(frozen=True)
class Family:
    """What the zoo knows of a group of architectures. A plugin offers them under the entry-point group `pagoda.models`.

    Attributes:
        name: short id.
        architectures: class names of config.json's `architectures`.
        model_types: values of `model_type`, for configurations without architectures.
        spec: reads the configuration. Every key must be read or be known to be harmless.
        rules: from transformers' tensor names to ours. GGUF files come through them too: their source speaks transformers' names.
        pools: its models answer with vectors or scores; all its specs have a pooler.
    """

    name: str
    architectures: tuple[str, ...]
    model_types: tuple[str, ...]
    spec: Callable[[Config], DecoderSpec]
    rules: Rules
    pools: bool = False
