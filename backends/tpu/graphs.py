"""Traced steps: a bucket's step is compiled as one program when it is captured, and found again by what it records."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from pagoda.backends.torch_host.graphs import tensors
from pagoda.backends.tpu.runtime import Runtime
from pagoda.hal.errors import DeviceError
from pagoda.hal.graphs import GraphPolicy, Replay

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
TOKENS = (16, 32, 64, 128, 256, 512, 1024, 2048)
"""Powers of two: each size is a compilation, and a step is at most half padding."""


class TracedReplay:
    """`fn(*inputs)` recorded anew on each call, which costs the host; the program is the one compiled at first."""

    def __init__(self, runtime: Runtime, fn: Callable[..., Any], inputs: tuple[torch.Tensor, ...]) -> None:
        self._runtime, self._fn, self._inputs = runtime, fn, inputs
        runtime.run()  # what comes before is not part of the step
        self._outputs = fn(*inputs)
        runtime.run()
        self.nbytes = sum(tensor.nbytes for tensor in tensors(self._outputs))

    def __call__(self) -> Any:
        self._runtime.run()
        for kept, fresh in zip(tensors(self._outputs), tensors(self._fn(*self._inputs)), strict=True):
            if kept is not fresh:
                kept.copy_(fresh)
        self._runtime.run()
        return self._outputs


class TracedSteps:
    """Steps of one device: every one is padded, for each new shape is a compilation."""

    def __init__(self, runtime: Runtime) -> None:
        self.policy = GraphPolicy("traced", TOKENS, ROWS, static_shapes=True)
        self._runtime = runtime

    def capture(self, key: Hashable, fn: Callable[..., Any], inputs: tuple[torch.Tensor, ...]) -> Replay:
        try:
            return TracedReplay(self._runtime, fn, inputs)
        except RuntimeError as error:
            raise DeviceError(f"step {key} could not be traced: {error}") from error
