"""Recorded steps of the CPU: equal to the step itself on changed inputs, native and torch calls in their order."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

import torch
from pagoda.backends.cpu.backend import CpuBackend
from pagoda.backends.cpu.graphs import RecordedGraphs, RecordedReplay
from pagoda.backends.cpu.workspace import CHUNK, Taken, Workspace
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


def _chain(width: int, kept: list[torch.Tensor] | None = None) -> Callable[[torch.Tensor], torch.Tensor]:
    """Many products one after the other, whose results are garbage at once; `kept` gets one of them."""
    gemm = TABLE.resolve("gemm", GemmFacts("float32", width, width))
    packed = gemm.pack({"weight": torch.eye(width)})

    def step(x: torch.Tensor) -> torch.Tensor:
        y = x
        for turn in range(20):
            y = gemm.run(packed, y + 1.0)
            if kept is not None and turn == 5:
                kept.append(y)
        return y if kept is None else y + kept[-1]

    return step


@torch.inference_mode()
def test_steps_of_all_sizes_share_the_memory_of_what_they_drop() -> None:
    graphs = RecordedGraphs()
    inputs = [torch.zeros(rows, 64) for rows in (1, 3000, 40)]
    replays = [graphs.capture(len(x), _chain(64), (x,)) for x in inputs]
    for turn in range(3):
        results = []
        for x, replay in zip(inputs, replays, strict=True):
            x.fill_(turn)
            results.append(replay())
        # A result stays what it is while others run.
        assert [set(result.flatten().tolist()) for result in results] == [{turn + 20.0}] * 3
    workspace = graphs._shared()
    assert len(workspace.chunks) == 1
    assert [replay.nbytes for replay in replays] == [x.nbytes for x in inputs]
    assert 20 * inputs[1].nbytes > CHUNK  # so each result was written over while the step went on
    del replays, replay
    gc.collect()
    assert graphs._shared() is not None and workspace.chunks
    del workspace
    assert graphs._shared() is None


@torch.inference_mode()
def test_a_step_that_gives_a_tensor_away_keeps_its_memory_for_itself() -> None:
    graphs, kept = RecordedGraphs(), []
    x, other = torch.zeros(3, 64), torch.zeros(3, 64)
    replay, second = graphs.capture("kept", _chain(64, kept), (x,)), graphs.capture("other", _chain(64), (other,))
    assert isinstance(replay, RecordedReplay)
    assert replay.nbytes > 20 * x.nbytes
    x.fill_(1.0)
    other.fill_(9.0)
    replay(), second()
    assert set(kept[-1].flatten().tolist()) == {7.0}
    assert set(replay().flatten().tolist()) == {28.0}


@torch.inference_mode()
def test_places_are_taken_again_when_views_too_are_garbage() -> None:
    taken = Taken(Workspace())
    first = taken.like(torch.empty(10, 8))
    view, start = first[2:, ::2], first.data_ptr()
    alias = taken.named(view)
    assert (alias.data_ptr(), alias.shape, alias.stride()) == (view.data_ptr(), view.shape, view.stride())
    second = taken.like(torch.empty(3, dtype=torch.int64))
    del first
    assert len(taken) == 2 and taken.like(torch.empty(10, 8)).data_ptr() not in (start, second.data_ptr())
    del view
    assert len(taken) == 1 and taken.like(torch.empty(10, 8)).data_ptr() == start
    big = taken.like(torch.empty(CHUNK, dtype=torch.float32))
    assert big.fill_(2.0).sum() == 2.0 * CHUNK


@torch.inference_mode()
def test_threads_record_apart_from_each_other() -> None:
    inputs, other = _inputs(0), _inputs(1)
    busy = _step(torch.zeros(5))
    stop = threading.Event()

    def work() -> None:
        with torch.inference_mode():
            while not stop.is_set():
                busy(*other)

    thread = threading.Thread(target=work, daemon=True)
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
