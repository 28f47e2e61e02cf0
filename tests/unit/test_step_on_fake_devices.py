"""A whole step of each kind of model on absent devices, with torch's fake tensors: nothing mixes devices, nothing waits for the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from absent_devices import KINDS, Elsewhere, NoTrips, watched
from absent_guards import add_guards
from pagoda.hal.table import KernelTable
from pagoda.models.direct import DirectRun
from pagoda.models.load import describe, load_model
from pagoda.ops.sampling import SamplingFacts, SamplingRows
from pagoda.serving.conformance.tiny_models import TINY
from torch._subclasses.fake_tensor import FakeTensorMode


@pytest.fixture(scope="module", autouse=True)
def guards(tmp_path_factory: pytest.TempPathFactory) -> None:
    add_guards(tmp_path_factory.mktemp("guards"))


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
