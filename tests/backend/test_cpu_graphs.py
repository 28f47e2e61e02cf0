"""Recorded steps of the CPU: equal to the step itself on changed inputs, native and torch calls in their order."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from pagoda.backends.cpu.backend import CpuBackend
from pagoda.backends.cpu.graphs import RecordedGraphs, RecordedReplay
from pagoda.backends.torch_host.graphs import EagerReplay
from pagoda.hal.comm import Topology
from pagoda.ops.linear import GemmFacts
from pagoda.ops.moe import MoeMlpFacts
from pagoda.ops.norm import NormFacts
from pagoda.ops.table import kernel_table

BACKEND = CpuBackend()
TABLE = kernel_table(BACKEND, BACKEND.describe())


def _step(state: torch.Tensor) -> Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """Native products and norms with torch between them: functional, in place, views, fresh memory, an update of state."""
    gen = torch.Generator().manual_seed(0)
    gemm = TABLE.resolve("gemm", GemmFacts("float32", 32, 32))
    norm = TABLE.resolve("add_rms_norm", NormFacts("float32", 32, 1e-5))
    packed, weight = gemm.pack({"weight": torch.randn(32, 32, generator=gen)}), norm.pack({"weight": torch.rand(32, generator=gen)})

    def step(x: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        residual = torch.zeros_like(x)
        y = gemm.run(packed, x)
        y, residual = norm.run(weight, y, residual)
        y = torch.where(y > 0, y, y * 0.5)[rows]
        y = gemm.run(packed, y.view(-1, 32).relu_())
        scratch = torch.empty(len(y), 32)
        scratch[:, :16] = y[:, 16:]
        scratch[:, 16:].copy_(y[:, :16])
        state[rows[:1]] += 1.0
        return scratch + state.sum(), y.argmax(-1)

    return step


def _inputs(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    gen = torch.Generator().manual_seed(seed)
    return torch.randn(5, 32, generator=gen), torch.randint(0, 5, (3,), generator=gen)


@torch.inference_mode()
def test_replay_equals_the_step_on_changed_inputs() -> None:
    state, mirror = torch.zeros(5), torch.zeros(5)
    inputs = _inputs(0)
    replay = RecordedGraphs().capture("key", _step(state), inputs)
    assert isinstance(replay, RecordedReplay)
    assert replay.nbytes > 0
    state.zero_()
    plain, first = _step(mirror), replay()
    for seed in range(1, 5):
        if seed > 1:
            for old, new in zip(inputs, _inputs(seed), strict=True):
                old.copy_(new)
            assert all(a is b for a, b in zip(first, replay(), strict=True))
        for got, wanted in zip(first, plain(*inputs), strict=True):
            assert torch.equal(got, wanted)
        assert torch.equal(state, mirror)


@torch.inference_mode()
def test_a_step_that_looks_at_values_runs_as_it_is() -> None:
    gen = torch.Generator().manual_seed(0)
    run = TABLE.resolve("moe_mlp", MoeMlpFacts("float32", 4, 8, 8, 1))
    packed = run.pack({"up": torch.randn(4, 16, 8, generator=gen), "down": torch.randn(4, 8, 8, generator=gen)})
    x, weights, ids = torch.randn(2, 8, generator=gen), torch.ones(2, 1), torch.tensor([[0], [1]])
    replay = RecordedGraphs().capture("key", lambda *_: run.run(packed, x, weights, ids), (x, ids))
    assert isinstance(replay, EagerReplay)
    ids.copy_(torch.tensor([[3], [3]]))
    assert torch.equal(replay(), run.run(packed, x, weights, ids))


@torch.inference_mode()
def test_threads_record_apart_from_each_other() -> None:
    inputs, other = _inputs(0), _inputs(1)
    busy = _step(torch.zeros(5))
    stop = threading.Event()

    def work() -> None:
        with torch.inference_mode():
            while not stop.is_set():
                busy(*other)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        replays = [RecordedGraphs().capture("key", _step(torch.zeros(5)), inputs) for _ in range(20)]
    finally:
        stop.set()
        thread.join()
    assert len({len(replay._program) for replay in replays if isinstance(replay, RecordedReplay)}) == 1


def test_ranks_of_a_group_run_eagerly() -> None:
    device = BACKEND.open()
    assert device.graphs.policy.mode == "captured"
    device.communicator(Topology(0, 1)).close()
    assert device.graphs.policy.mode == "eager"
