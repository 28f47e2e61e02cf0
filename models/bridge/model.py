"""A transformers module that computes a step of the engine: tokens of all requests in one row, attention on our pages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from pagoda.hal.errors import ModelError
from pagoda.models.adapters.slots import AdapterSlots
from pagoda.models.blocks.paged import PagedMixer, Step
from pagoda.models.blocks.stack import OnPages
from pagoda.models.bridge.compiled import compile_layers
from pagoda.models.bridge.encoder import BridgedEncoder, told_of_media
from pagoda.models.bridge.interface import ATTRIBUTE
from pagoda.models.bridge.module import Module
from pagoda.models.bridge.probe import head
from pagoda.models.bridge.spec import AttentionCall, BridgeSpec
from pagoda.models.builder import Builder
from pagoda.models.encoding import EncoderBatch
from pagoda.models.loaded import Loaded
from pagoda.models.media import Encoder
from pagoda.models.model import ModelFacts, ModelInputs, ModelOutput


class Now:
    """The step that a model's layers are in."""

    step: Step


class BridgedAttention(PagedMixer):
    """One attention call of a module: `interface.AttentionFunction` on pages."""

    def __init__(self, build: Builder, call: AttentionCall, now: Now) -> None:
        numerics = build.numerics
        self._now, self._sinks = now, call.sinks
        super().__init__(build, call.facts(numerics.dtype, numerics.kv_dtype), call.cache(numerics.kv_dtype))

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, options: dict[str, Any]
    ) -> torch.Tensor:
        if key.shape[2] != query.shape[2]:
            raise ModelError(f"a step of {query.shape[2]} tokens attends to {key.shape[2]} keys of its own, which are not its tokens'")
        q, k, v = (tensor[0].transpose(0, 1).contiguous() for tensor in (query, key, value))
        step, sinks = self._now.step, options["s_aux"] if self._sinks else None
        return self.attend(q, k, v, step, sinks)[None]


class InTurn:
    """The calls of a module that attends several times in a forward, one after another."""

    def __init__(self, calls: list[BridgedAttention]) -> None:
        self._calls, self._next = calls, 0

    def __call__(self, *arguments: Any) -> torch.Tensor:
        call, self._next = self._calls[self._next], (self._next + 1) % len(self._calls)
        return call(*arguments)


class BridgeModel(OnPages):
    """Implements `models.model.Model` on one rank.

    Args:
        build: of the device's table; notes what the attention calls use.
        module: None for a description alone.
        refill: reads the weights again into their places.
    """

    facts: ModelFacts

    def __init__(
        self, spec: BridgeSpec, build: Builder, facts: ModelFacts | None = None, module: Module | None = None,
        refill: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self.spec, self._module, self.refill, self._now = spec, module, refill, Now()
        if facts is not None:
            self.facts = facts
        self.adapters, self.loaded = AdapterSlots(), Loaded()
        sees = module is not None and spec.media is not None
        self.encoder: Encoder | None = BridgedEncoder(module, spec.body, spec.top) if sees else None
        super().__init__([BridgedAttention(build, call, self._now) for call in spec.calls], build.table)
        if module is not None:
            self.loaded.add([*module.parameters(), *module.buffers()])
            self._body = module.get_submodule(spec.body)
            for path in {call.path for call in spec.calls}:
                own = [mixer for call, mixer in zip(spec.calls, self._mixers, strict=True) if call.path == path]
                setattr(module.get_submodule(path), ATTRIBUTE, own[0] if len(own) == 1 else InTurn(own))

    def forward(self, inputs: ModelInputs) -> ModelOutput:
        if inputs.taps:
            raise ModelError("a model that runs through transformers gives no hidden states of layers")
        self._now.step = Step(inputs.groups, inputs.plans, (), inputs.positions, spans=inputs.spans)
        positions = (inputs.positions + self.spec.first_position).unsqueeze(-2)
        ids = inputs.token_ids.long()
        options = {"input_ids": ids[None]}
        if inputs.embeddings is not None:
            options = told_of_media(self._body, self.spec.width, ids, *inputs.embeddings)
        return ModelOutput(self._body(**options, position_ids=positions, use_cache=False).last_hidden_state[0])

    def compile(self) -> int:
        """See `compiled.compile_layers`."""
        return compile_layers(self._module, self.spec.body)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return head(self._module, self.spec.top, hidden[None])[0]

    def encode(self, batch: EncoderBatch) -> None:
        raise ModelError(f"{self.facts.architecture} runs through transformers and has no encoder")

    def pool(self, hidden: torch.Tensor) -> torch.Tensor:
        raise ModelError(f"{self.facts.architecture} runs through transformers and answers with tokens only")
