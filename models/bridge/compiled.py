"""torch.compile for modules that run on pages: what stands between a layer's attention calls becomes a few kernels."""

from __future__ import annotations

import torch
from pagoda.hal.errors import ConfigError
from pagoda.models.bridge.interface import APART, attend
from pagoda.models.bridge.module import Module, attend_by


def compile_layers(module: Module, body: str) -> int:
    """Each layer of the language model at `body` in place, once for all that are alike and for any number of tokens; attention stays as it
    is. Returns how many layers.

    Raises `ConfigError` where the module does not say which its layers are.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    names = set(getattr(module, "_no_split_modules", None) or ())
    layers = [part for part in module.modules() if type(part).__name__ in names]
    if not layers:
        raise ConfigError(f"{type(module).__name__} does not name its layers, so that they cannot be compiled: leave --torch-compile out")
    ALL_ATTENTION_FUNCTIONS.register(APART, torch.compiler.disable(attend))
    attend_by(module, body, APART)
    for layer in layers:
        layer.compile(dynamic=True)
    return len(layers)
