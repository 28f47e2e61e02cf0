"""CUDA graphs: a step is warmed up on a side stream, recorded once into a pool shared by all buckets, then replayed."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from pagoda.hal.errors import DeviceError
from pagoda.hal.graphs import GraphPolicy, Replay

ROWS = (1, 2, 4, 8, *range(16, 257, 16), *range(288, 513, 32))
"""Decode sizes that are captured; larger steps, and those with prompts, run eagerly."""


class CudaReplay:
    """A recorded step."""

    def __init__(self, graph: torch.cuda.CUDAGraph, outputs: Any, nbytes: int) -> None:
        self._graph = graph
        self._outputs = outputs
        self.nbytes = nbytes

    def __call__(self) -> Any:
        self._graph.replay()
        return self._outputs


class CudaGraphs:
    """Capture of steps on one GPU."""

    def __init__(self, device: torch.device) -> None:
        self.policy = GraphPolicy("captured", ROWS, ROWS)
        self._device = device
        self._pool: Any = None
        self._keeper: torch.cuda.CUDAGraph | None = None

    def capture(self, key: Hashable, fn: Callable[..., Any], inputs: tuple[torch.Tensor, ...]) -> Replay:
        before = torch.cuda.memory_reserved(self._device)
        try:
            self._warm_up(fn, inputs)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._shared_pool(), capture_error_mode="thread_local"):
                outputs = fn(*inputs)
        except RuntimeError as error:
            raise DeviceError(f"step {key} could not be captured: {error}") from error
        return CudaReplay(graph, outputs, torch.cuda.memory_reserved(self._device) - before)

    def _shared_pool(self) -> Any:
        """The pool of all buckets. A graph of its own holds it: torch cannot capture into a pool whose graphs have all gone."""
        if self._keeper is None:
            self._keeper, self._pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
            with torch.cuda.graph(self._keeper, pool=self._pool, capture_error_mode="thread_local"):
                torch.zeros(1, device=self._device)
        return self._pool

    def _warm_up(self, fn: Callable[..., Any], inputs: tuple[torch.Tensor, ...]) -> None:
        """Compiles and allocates outside the capture."""
        side = torch.cuda.Stream(self._device)
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            fn(*inputs)
        torch.cuda.current_stream(self._device).wait_stream(side)
