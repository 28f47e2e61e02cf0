"""Weights into a transformers module through our own sources, and the check that the bridge computes what transformers does."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from pagoda.hal.device import Device
from pagoda.hal.errors import CheckpointError, ModelError, PagodaError
from pagoda.hal.memory import MemoryKind
from pagoda.models.bridge.interface import RUN, register
from pagoda.models.bridge.model import BridgeModel
from pagoda.models.bridge.module import Module, attend_by, bridged_class, choose_experts, hollow_module, read_config
from pagoda.models.bridge.spec import BridgeSpec
from pagoda.models.builder import Builder
from pagoda.models.direct import DirectRun
from pagoda.models.model import ModelFacts
from pagoda.quant.format import StoredTensor

log = logging.getLogger("pagoda.models")

CHECKED = (9, 4)
"""Tokens of the check: a prompt, and what follows it in another step."""

APART = {"float32": 1e-3, "float64": 1e-3}
LOOSE = 0.1
"""Relative difference of hidden states that rounding explains, by dtype; otherwise `LOOSE`."""


class Lazy:
    """A stored tensor as transformers reads them: `[...]` gives its numbers."""

    def __init__(self, stored: StoredTensor) -> None:
        self._stored = stored
        self.shape, self.dtype = torch.Size(stored.shape), getattr(torch, stored.dtype)

    def __getitem__(self, _: Any) -> torch.Tensor:
        return self._stored.read()

    def get_shape(self) -> list[int]:
        return list(self.shape)


def load_bridged(spec: BridgeSpec, facts: ModelFacts, build: Builder, device: Device, stored: Mapping[str, StoredTensor]) -> BridgeModel:
    """Read and place the weights, and compare a few tokens with transformers' own attention. Raises `CheckpointError`, `ModelError`."""
    register()
    dtype = build.numerics.dtype
    if device.torch_device.type == "meta":
        return BridgeModel(spec, build, facts, hollow_module(spec.config, dtype, RUN))
    module = _module(spec.config, dtype, stored)
    attend_by(module, spec.body, RUN)
    _place(module, device)
    model = BridgeModel(spec, build, facts, module, lambda: _refill(module, spec.config, dtype, stored))
    _check(model, device, dtype)
    return model


def _module(config: Mapping[str, Any], dtype: str, stored: Mapping[str, StoredTensor]) -> Module:
    kind, weights = bridged_class(config), {name: Lazy(tensor) for name, tensor in stored.items()}
    settings = read_config(config)
    try:
        module, info = kind.from_pretrained(
            None, config=settings, state_dict=weights, dtype=getattr(torch, dtype), attn_implementation="eager", output_loading_info=True
        )
    except (RuntimeError, ValueError, OSError) as error:
        raise CheckpointError(f"transformers cannot load these weights into {kind.__name__}: {error}") from error
    missing = sorted(info["missing_keys"])
    if missing:
        raise CheckpointError(f"{kind.__name__} lacks {len(missing)} tensors: {', '.join(missing[:20])}; fetch the checkpoint again")
    unexpected = sorted(info["unexpected_keys"])
    if unexpected:
        log.warning("%s does not use %d tensors of the checkpoint: %s", kind.__name__, len(unexpected), ", ".join(unexpected[:20]))
    choose_experts(module)
    return module.eval().requires_grad_(False)


def _place(module: Module, device: Device) -> None:
    """Every tensor where the device counts it; tied ones stay one."""
    moved: dict[int, torch.Tensor] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        old = tensor.data
        key = old.data_ptr() if old.numel() else id(tensor)
        if key not in moved:
            moved[key] = device.memory.alloc(MemoryKind.WEIGHTS, tuple(old.shape), old.dtype).copy_(old)
        tensor.data = moved[key]


def _refill(module: Module, config: Mapping[str, Any], dtype: str, stored: Mapping[str, StoredTensor]) -> None:
    again = _module(config, dtype, stored)
    for tensors, fresh in ((module.parameters(), again.parameters()), (module.buffers(), again.buffers())):
        for tensor, new in zip(tensors, fresh, strict=True):
            tensor.data.copy_(new)


@torch.inference_mode()
def _check(model: BridgeModel, device: Device, dtype: str) -> None:
    ids = [(64 + 7919 * i) % model.facts.vocab_size for i in range(sum(CHECKED))]
    try:
        run = DirectRun(model, device, 1, len(ids))
        steps = [run.step([(0, ids[: CHECKED[0]])]).hidden, run.step([(0, ids[CHECKED[0] :])]).hidden]
        own = model.own_hidden(ids).split(CHECKED)
    except PagodaError:
        raise
    except Exception as error:  # whatever a model's code raises without its masks and caches
        name = model.facts.architecture
        raise ModelError(f"transformers' {name} cannot run on pages: {type(error).__name__}: {error}") from error
    for ours, theirs in zip(steps, own, strict=True):
        apart = ((ours - theirs).float().norm(dim=-1) / theirs.float().norm(dim=-1).clamp(min=1e-6)).median()
        if not apart <= APART.get(dtype, LOOSE):
            raise ModelError(
                f"{model.facts.architecture} through the bridge is {float(apart):.2g} apart from transformers' own attention:"
                " it uses something that the attention interface does not say, so that it would be served wrong"
            )
