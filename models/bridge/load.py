"""Weights into a transformers module through our own sources, and the check that the bridge computes what transformers does."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from pagoda.hal.device import Device
from pagoda.hal.errors import CheckpointError, ConfigError, ModelError, PagodaError
from pagoda.hal.memory import MemoryKind
from pagoda.models.bridge.crossed import CrossedTexts
from pagoda.models.bridge.interface import RUN, register
from pagoda.models.bridge.kinds import bridged_class
from pagoda.models.bridge.model import BridgeModel
from pagoda.models.bridge.module import ONE_AT_A_TIME, Module, attend_by, choose_experts, hollow_module, own_hidden, read_config
from pagoda.models.bridge.spec import Answers, BridgeSpec
from pagoda.models.bridge.split import split_module
from pagoda.models.bridge.texts import PooledTexts, RecomputedTexts, TextModel
from pagoda.models.builder import Builder
from pagoda.models.direct import DirectRun
from pagoda.models.model import ModelFacts
from pagoda.models.parallel.shard import Shard
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


def load_bridged(
    spec: BridgeSpec, facts: ModelFacts, build: Builder, device: Device, stored: Mapping[str, StoredTensor]
) -> BridgeModel | TextModel:
    """Read and place the weights, and hold a few tokens against what transformers does. Raises `CheckpointError`, `ModelError`."""
    register()
    dtype, attention = build.numerics.dtype, RUN if spec.way == "paged" else None

    def read() -> Module:
        return filled_module(spec.config, spec.answers, dtype, stored, attention)

    if device.torch_device.type == "meta":
        return _hollow(spec, facts, build, hollow_module(bridged_class(spec.config, spec.answers), spec.config, dtype, attention))
    module, want = read(), None
    if spec.way == "paged":
        attend_by(module, spec.body, RUN)
    if build.shard.world > 1:
        want = own_hidden(module, spec.body, _some_ids(facts.vocab_size), RUN)
        split_module(module, build.shard, build.communicator)
    place(module, device)
    refill = partial(_refill, module, read, build.shard)
    if spec.way == "texts":
        return _texts(spec, facts, build, module, refill)
    model = BridgeModel(spec, build, facts, module, refill)
    if want is None:
        want = own_hidden(module, spec.body, _some_ids(facts.vocab_size), RUN)
    _check(model, device, dtype, want, build.shard.world)
    return model


def _hollow(spec: BridgeSpec, facts: ModelFacts, build: Builder, module: Module) -> BridgeModel | TextModel:
    if spec.way == "texts":
        return _text_model(spec)(spec, build.table, facts, module)
    if build.shard.world > 1:
        split_module(module, build.shard)
    return BridgeModel(spec, build, facts, module)


def _texts(spec: BridgeSpec, facts: ModelFacts, build: Builder, module: Module, refill: Callable[[], None]) -> TextModel:
    model = _text_model(spec)(spec, build.table, facts, module, refill)
    if isinstance(model, RecomputedTexts):
        _check_causal(model, build.numerics.dtype)
    return model


def _text_model(spec: BridgeSpec) -> type[TextModel]:
    if spec.answers != "tokens":
        return PooledTexts
    return RecomputedTexts if spec.crossing is None else CrossedTexts


def filled_module(
    config: Mapping[str, Any], answers: Answers, dtype: str, stored: Mapping[str, StoredTensor], attention: str | None,
    never: tuple[str, ...] = (),
) -> Module:  # fmt: skip
    """transformers' module with its weights, on the host. `never`: how names begin that do not run. Raises `CheckpointError`."""
    kind, weights = bridged_class(config, answers), {name: Lazy(tensor) for name, tensor in stored.items()}
    settings, asked = read_config(config), {} if attention is None else {"attn_implementation": "eager"}
    try:
        with ONE_AT_A_TIME:
            module, info = kind.from_pretrained(
                None, config=settings, state_dict=weights, dtype=getattr(torch, dtype), output_loading_info=True, **asked
            )
    except (RuntimeError, ValueError, OSError) as error:
        raise CheckpointError(f"transformers cannot load these weights into {kind.__name__}: {error}") from error
    # What a plain model makes of its first state is not asked for, and often not stored.
    missing = [name for name in info["missing_keys"] if not name.startswith(never) and (answers != "vectors" or "pooler" not in name)]
    if missing:
        names = ", ".join(sorted(missing)[:20])
        raise CheckpointError(f"{kind.__name__} lacks {len(missing)} tensors: {names}; fetch the checkpoint again")
    unexpected = sorted(info["unexpected_keys"])
    if unexpected:
        log.warning("%s does not use %d tensors of the checkpoint: %s", kind.__name__, len(unexpected), ", ".join(unexpected[:20]))
    choose_experts(module)
    return module.eval().requires_grad_(False)


def place(module: Module, device: Device) -> None:
    """Every tensor where the device counts it; tied ones stay one."""
    moved: dict[int, torch.Tensor] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        old = tensor.data
        key = old.data_ptr() if old.numel() else id(tensor)
        if key not in moved:
            moved[key] = device.memory.alloc(MemoryKind.WEIGHTS, tuple(old.shape), old.dtype).copy_(old)
        tensor.data = moved[key]


def _refill(module: Module, read: Callable[[], Module], shard: Shard) -> None:
    again = read()
    if shard.world > 1:
        split_module(again, shard)
    for tensors, fresh in ((module.parameters(), again.parameters()), (module.buffers(), again.buffers())):
        for tensor, new in zip(tensors, fresh, strict=True):
            tensor.data.copy_(new)


@torch.inference_mode()
def _check_causal(model: RecomputedTexts, dtype: str) -> None:
    """Whether a text that grows keeps what it was answered; models that look ahead are run as transformers runs them, and it is said."""
    ids = torch.tensor(_some_ids(model.facts.vocab_size))
    short = ids[: CHECKED[0]]
    try:
        before, after = model.of_text(short, len(short)), model.of_text(ids, len(ids))[: len(short)]
    except Exception as error:  # whatever a model's code raises
        raise ModelError(f"transformers' {model.facts.architecture} cannot read a text alone: {type(error).__name__}: {error}") from error
    apart = ((before - after).float().norm(dim=-1) / before.float().norm(dim=-1).clamp(min=1e-6)).median()
    if not apart <= APART.get(dtype, LOOSE):
        log.warning(
            "%s is not causal: what it makes of a prompt's tokens depends on those that follow, so that prompt log-probabilities depend on"
            " the parts in which a prompt is run",
            model.facts.architecture,
        )


def _some_ids(vocab: int) -> list[int]:
    return [(64 + 7919 * i) % vocab for i in range(sum(CHECKED))]


@torch.inference_mode()
def _check(model: BridgeModel, device: Device, dtype: str, want: torch.Tensor, world: int) -> None:
    ids = _some_ids(model.facts.vocab_size)
    try:
        run = DirectRun(model, device, 1, len(ids))
        steps = [run.step([(0, ids[: CHECKED[0]])]).hidden, run.step([(0, ids[CHECKED[0] :])]).hidden]
    except PagodaError:
        raise
    except Exception as error:  # whatever a model's code raises without its masks and caches
        name = model.facts.architecture
        raise ModelError(f"transformers' {name} cannot run on pages: {type(error).__name__}: {error}") from error
    for ours, theirs in zip(steps, want.to(steps[0].device).split(CHECKED), strict=True):
        apart = ((ours - theirs).float().norm(dim=-1) / theirs.float().norm(dim=-1).clamp(min=1e-6)).median()
        if apart <= APART.get(dtype, LOOSE):
            continue
        if world > 1:
            raise ConfigError(
                f"{model.facts.architecture} cannot be split over {world} ranks by its plan: their answer is {float(apart):.2g} apart from"
                " the whole model's; use tensor_parallel_size=1"
            )
        raise ModelError(
            f"{model.facts.architecture} through the bridge is {float(apart):.2g} apart from transformers' own attention:"
            " it uses something that the attention interface does not say, so that it would be served wrong"
        )
