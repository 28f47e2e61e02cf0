"""A whole step of each kind of model on absent devices, with torch's fake tensors: nothing mixes devices, nothing waits for the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from absent_guards import add_guards
from pagoda.backends.torch_host.graphs import EagerGraphs
from pagoda.backends.torch_host.kv import host_layout
from pagoda.hal.discovery import find
from pagoda.hal.kernel import Kernel
from pagoda.hal.kv import CacheGroup
from pagoda.hal.memory import MemoryKind
from pagoda.hal.table import KernelTable
from pagoda.models.direct import DirectRun
from pagoda.models.load import describe, load_model
from pagoda.ops.references import portable_kernels, reference_kernels
from pagoda.ops.sampling import SamplingFacts, SamplingRows
from pagoda.serving.conformance.tiny_models import TINY
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

KINDS = {"cuda": "cuda", "xpu": "xpu", "mps": "metal"}
"""torch's device type → the backend."""


@pytest.fixture(scope="module", autouse=True)
def guards(tmp_path_factory: pytest.TempPathFactory) -> None:
    add_guards(tmp_path_factory.mktemp("guards"))


class Elsewhere:
    """A device that is not here, as far as tensors go."""

    def __init__(self, kind: str) -> None:
        self.torch_device = torch.device(kind, 0)
        self.info = find(KINDS[kind]).describe(None)
        self.memory = self
        self.graphs = EagerGraphs()

    def alloc(self, kind: MemoryKind, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=self.torch_device)

    def kv_layout(self, group: CacheGroup) -> Any:
        return host_layout(group, self.memory, 64)  # type: ignore[arg-type]

    def extension(self, protocol: type[Any]) -> None:
        """It has none."""

    def kernels(self) -> tuple[Kernel, ...]:
        """What its table has in plain torch: kernels that are compiled cannot take tensors without bytes."""
        own = [one for one in find(KINDS[self.torch_device.type]).kernels() if one.name == "torch"]
        return (*own, *reference_kernels(), *portable_kernels())


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
def step_on(kind: str, config: dict[str, Any]) -> Iterator[tuple[DirectRun, NoTrips, Callable[..., Any]]]:
    """A model whose tensors are fake, on that device; its steps are watched."""
    device: Any = Elsewhere(kind)
    table = KernelTable(device.info, device.kernels())
    trips = NoTrips(kind)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = load_model(describe(config, dtype="float32", table=table), device, table)
        draw = table.resolve("sample", SamplingFacts("float32", model.facts.vocab_size)).run
        forward, logits = model.forward, model.logits
        model.forward, model.logits = watched(trips, forward), watched(trips, logits)  # type: ignore[method-assign]
        yield DirectRun(model, device, 3, 40), trips, watched(trips, draw)


def drawing(kind: str, rows: int) -> SamplingRows:
    def of(value: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((rows,), value, dtype=dtype, device=kind)

    return SamplingRows(
        of(0.7, torch.float32), of(9, torch.int32), of(0.9, torch.float32), of(0.1, torch.float32), of(5, torch.int64), of(6, torch.int64)
    )


def watched(trips: NoTrips, call: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        with trips:
            return call(*args)

    return run


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model", sorted(TINY))
def test_a_step_stays_on_its_device_and_never_waits(kind: str, model: str) -> None:
    with step_on(kind, TINY[model]) as (run, trips, draw), torch.inference_mode():
        prompts = run.step([(0, [1] * 5), (1, [2]), (2, [3] * 17)]).hidden
        decode = run.step([(0, [4]), (1, [5]), (2, [6])]).hidden
        logits = run.model.logits(decode)
        drawn, bad = draw(logits.float(), drawing(kind, 3))
    assert prompts.shape[0] == 23 and decode.shape[0] == 3 and drawn.shape == bad.shape == (3,)
    assert {x.device.type for x in (prompts, decode, logits, drawn, bad)} == {kind} and trips.seen > 100


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
        x = torch.ones(4, device="cuda:0")
        with pytest.raises(Exception, match=r"touches|aten\.(_local_scalar_dense|nonzero|index)|two different devices"):
            watched(NoTrips("cuda"), trip)(x)
