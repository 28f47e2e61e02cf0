"""The engine's whole step on absent devices, with torch's fake tensors: from token ids to samples nothing leaves the device.

Steps come from a real engine on the reference device: what was packed for it, as tensors without bytes of the absent one.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from absent_devices import KINDS, Elsewhere, NoTrips, watched
from absent_guards import add_guards
from pagoda.hal.table import KernelTable
from pagoda.models.load import describe, load_model
from pagoda.serving.engine.batch import StepBatch
from pagoda.serving.engine.build import engine_starter
from pagoda.serving.engine.config import EngineConfig
from pagoda.serving.engine.engine_plan import plan_engine
from pagoda.serving.engine.forward import Forward, StepTensors
from pagoda.serving.engine.inprocess_client import InProcessClient
from pagoda.serving.engine.pages import Pages
from pagoda.serving.engine.sampler import Sampler
from pagoda.serving.engine.settings import Use
from tiny import CONFIG, tiny_config
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves
from toy import toy_request

ROWS = 6
ASKED: tuple[dict[str, Any], ...] = (
    {}, {"temperature": 0.8, "seed": 1, "top_k": 7, "top_p": 0.9, "min_p": 0.05}, {"logprobs": 3}, {"temperature": 1.0, "seed": 2},
    {"presence_penalty": 0.5, "repetition_penalty": 1.2}, {"logit_bias": {5: 2.0}, "temperature": 0.5, "seed": 3},
)  # fmt: skip


class Steps(NamedTuple):
    """What an engine ran: its steps, its cache groups and how many pages there were."""

    batches: list[StepBatch]
    groups: Any
    num_pages: int


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Steps:
    add_guards(tmp_path_factory.mktemp("guards"))
    batches: list[StepBatch] = []
    call = Forward.__call__

    def seen(self: Forward, batch: StepBatch) -> StepTensors:
        batches.append(batch)
        return call(self, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Forward, "__call__", seen)
        config = tiny_config(tmp_path_factory.mktemp("model"), device="reference", max_num_seqs=ROWS, max_num_batched_tokens=24)
        asyncio.run(_ask(config))
    plan = plan_engine(config)
    return Steps(batches, plan.groups, plan.num_pages + 1)


async def _ask(config: EngineConfig) -> None:
    client = await InProcessClient.start(engine_starter(config))
    try:

        async def ask(number: int) -> None:
            async for _ in client.generate(toy_request(str(number), [9 + number] * (5 + 9 * number), 5, **ASKED[number])):
                pass

        await asyncio.gather(*map(ask, range(len(ASKED))))
    finally:
        await client.close()


def test_the_steps_ask_for_everything(steps: Steps) -> None:
    uses = 0
    for batch in steps.batches:
        uses |= batch.use
    for use in (Use.RANDOM, Use.FILTER, Use.LOGPROBS, Use.PENALTY):
        assert uses & use, use
    assert any("edit_rows" in batch.views for batch in steps.batches)
    assert {batch.uniform for batch in steps.batches} == {True, False}, "prompts and decodes"


@pytest.mark.heavy
@pytest.mark.parametrize("kind", KINDS)
def test_an_engines_step_stays_on_its_device_and_never_waits(kind: str, steps: Steps) -> None:
    device: Any = Elsewhere(kind)
    table, trips = KernelTable(device.info, device.kernels()), NoTrips(kind)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.inference_mode():
        model = load_model(describe(CONFIG, dtype="float32", table=table), device, table)
        Pages(device, steps.groups, steps.num_pages, CONFIG["num_hidden_layers"]).bind(model)
        sampler = Sampler(device, table, CONFIG["vocab_size"], ROWS)
        sampler._counts._grow(ROWS + 1)
        forward = Forward(device, model, sampler, ROWS)
        for batch in steps.batches:
            views = {name: torch.empty(view.shape, dtype=view.dtype, device=device.torch_device) for name, view in batch.views.items()}
            given = tuple(tensor for tensor in views.values())
            left = watched(trips, forward)(replace(batch, views=views))
            assert left.sampled.tokens.shape[0] == len(batch.views.get("sample_rows", ()))
            found = [leaf for leaf in tree_leaves((left, given)) if isinstance(leaf, torch.Tensor)]
            assert {tensor.device.type for tensor in found} == {kind}
    assert trips.seen > 100 * len(steps.batches)
