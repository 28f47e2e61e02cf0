"""torch.compile of models that run through transformers, as `--torch-compile` asks; families here run fused kernels as they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pagoda.hal.device import Device
from pagoda.hal.errors import ConfigError
from pagoda.hal.info import Feature
from pagoda.models.bridge.model import BridgeModel
from pagoda.models.bridge.spec import BridgeSpec
from pagoda.models.load import Description
from pagoda.models.model import Model
from pagoda.serving.engine.config import EngineConfig


def to_compile(config: EngineConfig, description: Description, ranks: int, device: Device) -> EngineConfig:
    """The configuration for layers that are compiled. Compiled code for hosts is called past torch, where the host's replays do not see it:
    such steps run as they are.

    Raises `ConfigError` where there is nothing to compile, before weights are read.
    """
    spec, name = description.spec, description.facts.architecture
    if not isinstance(spec, BridgeSpec):
        raise ConfigError(
            f"{name} runs on kernels of its own, which are fused already: leave --torch-compile out, or add --model-impl transformers"
        )
    if spec.way != "paged":
        raise ConfigError(f"{name} does not run on pages, so that --torch-compile has no layers to compile: leave it out")
    if ranks > 1:
        raise ConfigError(f"--torch-compile is for one rank, and {ranks} are asked for: leave it or --tensor-parallel-size out")
    if device.graphs.policy.mode == "traced":
        raise ConfigError(f"{device.info.model} compiles whole steps as it is: leave --torch-compile out")
    return config if Feature.TRITON in device.info.features else replace(config, graphs="none")


def compiled(load: Callable[..., Model], **options: Any) -> Model:
    """What `load` gives, its layers compiled: at the start, and when weights are read again. What compiles is done at their first steps."""
    model = load(**options)
    assert isinstance(model, BridgeModel)  # as `to_compile` made sure
    model.compile()
    return model
