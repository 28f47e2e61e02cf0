"""A table that a head multiplies by too is there once where the kernels of both lay it out alike."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from pagoda.hal.comm import Topology
from pagoda.serving.engine.build import build_runner
from pagoda.serving.engine.config import EngineConfig
from pagoda.serving.engine.engine_plan import plan_engine
from pagoda.serving.engine.params import SamplingParams
from pagoda.serving.engine.runner import Runner
from tiny import tiny_config
from tiny_checkpoints import make

TIED = {"tie_word_embeddings": True, "vocab_size": 1000}


def _tokens(runner: Runner) -> list[int]:
    """After eight prompts of twelve tokens."""
    plan, found = runner._dummies.plan(1, 12, SamplingParams(temperature=0), False), []
    for turn in range(8):
        ids = (37 * np.arange(12, dtype=np.int32) + 101 * turn + 5) % 1000
        found += runner.run(replace(plan, token_ids=ids)).tokens.flatten().tolist()
    assert len(set(found)) > 1
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_table_serves_both(tmp_path: Path, dtype: str) -> None:
    runner = build_runner(tiny_config(tmp_path, TIED, device="cpu", dtype=dtype), Topology(0, 1))
    apart = build_runner(tiny_config(tmp_path, TIED, device="cpu", dtype=dtype, kernel={"embedding": "reference"}), Topology(0, 1))
    assert runner.facts.kernels["embedding"] == "native" and apart.facts.kernels["embedding"] == "reference"
    table = 1000 * 64 * (4 if dtype == "float32" else 2)
    assert table <= apart.facts.weight_bytes - runner.facts.weight_bytes <= 1.1 * table
    assert _tokens(runner) == _tokens(apart)


def test_the_plan_counts_it_once(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, TIED, device="cpu")
    used, plan = build_runner(config, Topology(0, 1)).facts.weight_bytes, plan_engine(config).memory.weights
    assert used == pytest.approx(plan, rel=0.01)


def test_weights_are_read_again_into_both(tmp_path: Path) -> None:
    runner = build_runner(tiny_config(tmp_path, TIED, device="cpu"), Topology(0, 1))
    before = _tokens(runner)
    runner._forward.model.refill()
    assert _tokens(runner) == before


def test_a_head_that_lies_otherwise_has_its_own(tmp_path: Path) -> None:
    runner = build_runner(tiny_config(tmp_path, TIED, device="cpu", kernel={"gemm": "reference"}), Topology(0, 1))
    plain = build_runner(tiny_config(tmp_path, TIED, device="cpu"), Topology(0, 1))
    assert _tokens(runner) == _tokens(plain)


def test_nothing_of_the_file_stays_mapped(tmp_path: Path, require) -> None:
    require("Linux", Path("/proc/self/maps").exists())
    make(tmp_path, "Llama", tie_word_embeddings=True, vocab_size=1000)
    runner = build_runner(EngineConfig(model=str(tmp_path), device="cpu", num_gpu_blocks_override=200), Topology(0, 1))
    assert runner.facts.kernels["embedding"] == "native"
    gc.collect()
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
