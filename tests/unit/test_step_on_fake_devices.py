"""A whole step of each kind of model on absent devices, with torch's fake tensors: nothing mixes devices, nothing waits for the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from pagoda.backends.torch_host.kv import host_layout
from pagoda.hal.discovery import find
from pagoda.hal.kv import CacheGroup
from pagoda.hal.memory import MemoryKind
from pagoda.hal.table import KernelTable
from pagoda.models.direct import DirectRun
from pagoda.models.load import describe, load_model
from pagoda.ops.registry import portable_kernels, reference_kernels
from pagoda.serving.conformance.tiny_models import TINY
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

KINDS = ("cuda", "xpu", "mps")


class Elsewhere:
    """A device of another kind as far as tensors go."""

    def __init__(self, kind: str) -> None:
        self.torch_device = torch.device(kind)
        self.info = replace(find("reference").open().info, features=frozenset())
        self.memory = self

    def alloc(self, kind: MemoryKind, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=self.torch_device)

    def kv_layout(self, group: CacheGroup) -> Any:
        return host_layout(group, self.memory, 64)  # type: ignore[arg-type]


class NoTrips(TorchDispatchMode):
    """Refuses every operator that touches another device; numbers of no dimension may come from the host."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.seen = kind, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves((args, kwargs, result)):
            if isinstance(x, torch.Tensor) and x.dim() and x.device.type != self.kind:
                raise AssertionError(f"{func} touches {x.device} in a step on {self.kind}")
        self.seen += 1
        return result


@contextmanager
def step_on(kind: str, config: dict[str, Any]) -> Iterator[tuple[DirectRun, NoTrips]]:
    """A model whose tensors are fake, on that device; its steps are watched."""
    device: Any = Elsewhere(kind)
    table = KernelTable(device.info, (*reference_kernels(), *portable_kernels()))
    trips = NoTrips(kind)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = load_model(describe(config, dtype="float32", table=table), device, table)
        forward, logits = model.forward, model.logits
        model.forward, model.logits = watched(trips, forward), watched(trips, logits)  # type: ignore[method-assign]
        yield DirectRun(model, device, 3, 40), trips


def watched(trips: NoTrips, call: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        with trips:
            return call(*args)

    return run


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model", sorted(TINY))
def test_a_step_stays_on_its_device_and_never_waits(kind: str, model: str) -> None:
    with step_on(kind, TINY[model]) as (run, trips):
        prompts = run.step([(0, [1] * 5), (1, [2]), (2, [3] * 17)]).hidden
        decode = run.step([(0, [4]), (1, [5]), (2, [6])]).hidden
        with torch.inference_mode():
            answers = run.model.logits(decode)
    assert prompts.shape[0] == 23 and decode.shape[0] == 3 and answers.shape[0] == 3
    assert {x.device.type for x in (prompts, decode, answers)} == {kind} and trips.seen > 100


@pytest.mark.parametrize(
    "trip",
    [
        lambda x: x.sum().item(),
        lambda x: x.cpu(),
        lambda x: x.nonzero(),
        lambda x: x + torch.ones(4),
        lambda x: x[x > 0],
        lambda x: x.tolist(),
    ],
)
def test_a_trip_to_the_host_is_seen(trip: Callable[[torch.Tensor], Any]) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.ones(4, device="cuda")
        with pytest.raises(Exception, match=r"(?i)touches|data.?dependent|dynamic|two different devices|item"):
            watched(NoTrips("cuda"), trip)(x)
