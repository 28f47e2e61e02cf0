"""The plan of an engine: it is what is then used, it names what would fit, and it speaks of devices that are not here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pagoda.hal.comm import Topology
from pagoda.hal.errors import CapacityError, ConfigError, DeviceError, KernelError
from pagoda.serving.engine.build import build_runner
from pagoda.serving.engine.engine_plan import plan_engine
from pagoda.serving.engine.sizing import SHARED_KV_BYTES
from tiny import tiny_config


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True, "torch_dtype": "bfloat16"},
        {"num_hidden_layers": 3, "vocab_size": 1000, "attention_bias": True},
    ],
)
@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_the_plan_is_what_is_used(tmp_path: Path, changes: dict[str, Any], device: str) -> None:
    config = tiny_config(tmp_path, changes, device=device)
    plan = plan_engine(config)
    runner = build_runner(config, Topology(0, 1))
    used = runner.memory()
    assert used["kv"] == plan.memory.kv == runner.facts.kv_bytes
    assert runner.facts.weight_bytes == pytest.approx(plan.memory.weights, rel=0.01)
    assert sum(plan.weights.values()) == plan.memory.weights and sum(plan.work.values()) == plan.memory.work
    assert used["work"] <= plan.memory.work
    assert runner.facts.num_pages == plan.num_pages + 1 == 201
    assert runner.facts.max_model_len == plan.max_model_len == 512
    assert set(runner.facts.kernels) == {choice.op for choice in plan.kernels}


def test_the_default_models_plan_is_what_is_used() -> None:
    from pagoda.serving.engine.config import EngineConfig

    config = EngineConfig(device="cpu", max_num_seqs=4, kv_cache_memory_bytes=64 * 2**20)
    plan = plan_engine(config)
    runner = build_runner(config, Topology(0, 1))
    assert runner.facts.weight_bytes == pytest.approx(plan.memory.weights, rel=0.01)
    assert plan.format and plan.parameters == pytest.approx(135e6, rel=0.01)
    assert 0 < runner.memory()["kv"] <= 64 * 2**20


def test_lengths_and_requests(tmp_path: Path) -> None:
    plan = plan_engine(tiny_config(tmp_path, num_gpu_blocks_override=64, block_size=16))
    assert (plan.num_pages, plan.tokens, plan.longest) == (64, 1024, 1024)
    assert plan.requests == ((256, 4), (512, 2)) and plan.max_positions == 512


def test_a_length_that_does_not_fit_names_the_largest_that_does(tmp_path: Path) -> None:
    small = {"num_gpu_blocks_override": 10, "block_size": 16}
    with pytest.raises(CapacityError, match="--max-model-len 160 or less") as caught:
        plan_engine(tiny_config(tmp_path, max_model_len=400, **small))
    assert (caught.value.asked, caught.value.available) == (400, 160)
    assert plan_engine(tiny_config(tmp_path, max_model_len=160, **small)).max_model_len == 160
    assert plan_engine(tiny_config(tmp_path, **small)).max_model_len == 160
    with pytest.raises(ConfigError, match="512 positions"):
        plan_engine(tiny_config(tmp_path, max_model_len=513))


def test_sliding_windows_make_longer_sequences_fit(tmp_path: Path) -> None:
    changes = {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": 32,
        "max_position_embeddings": 4096,
    }
    plan = plan_engine(tiny_config(tmp_path, changes, num_gpu_blocks_override=30, block_size=16))
    assert plan.max_model_len == 4096 > 30 * 16


def test_a_pool_on_shared_memory_is_bounded(tmp_path: Path) -> None:
    plan = plan_engine(tiny_config(tmp_path, num_gpu_blocks_override=None))
    assert 0 < plan.memory.kv <= SHARED_KV_BYTES
    given = plan_engine(tiny_config(tmp_path, num_gpu_blocks_override=None, kv_cache_memory_bytes=10 * 2**20))
    assert 10 * 2**20 - given.memory.page_bytes < given.memory.kv <= 10 * 2**20


def test_too_little_memory_says_the_numbers(tmp_path: Path) -> None:
    with pytest.raises(CapacityError):
        plan_engine(tiny_config(tmp_path, num_gpu_blocks_override=None, kv_cache_memory_bytes=1 << 60))
    with pytest.raises(CapacityError, match="at least 2"):
        plan_engine(tiny_config(tmp_path, num_gpu_blocks_override=None, kv_cache_memory_bytes=4096))
    with pytest.raises(CapacityError):
        plan_engine(tiny_config(tmp_path, device_memory_utilization=1e-5))


@pytest.mark.parametrize("device", ["null:h200", "cuda:h200"])
def test_absent_devices(tmp_path: Path, device: str) -> None:
    plan = plan_engine(tiny_config(tmp_path, device=device, num_gpu_blocks_override=None))
    assert plan.device.model == "h200" and "not here" in plan.why
    assert plan.memory.total > 100 * 2**30 and plan.memory.kv > 100 * 2**30
    names = {choice.op: choice.chosen.name for choice in plan.kernels}
    assert names["paged_attention"] == ("triton" if device == "cuda:h200" else "reference")
    with pytest.raises(DeviceError, match="h200"):
        plan_engine(tiny_config(tmp_path, device="null:h900"))


def test_tensor_parallel_plans_are_of_one_rank(tmp_path: Path) -> None:
    one, two = (plan_engine(tiny_config(tmp_path, tensor_parallel_size=world)) for world in (1, 2))
    assert two.memory.page_bytes * 2 == one.memory.page_bytes and two.memory.weights < 0.6 * one.memory.weights
    with pytest.raises(ConfigError, match="tensor_parallel_size=3"):
        plan_engine(tiny_config(tmp_path, tensor_parallel_size=3))


def test_what_cannot_work_is_refused_before_loading(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_model_len=1000000000000 is above the"):
        plan_engine(tiny_config(tmp_path, max_model_len=10**12))
    with pytest.raises(ConfigError, match="block_size=17"):
        plan_engine(tiny_config(tmp_path, block_size=17))
    with pytest.raises(KernelError, match="paged_attention=unheard"):
        plan_engine(tiny_config(tmp_path, kernel={"paged_attention": "unheard"}))
    with pytest.raises(DeviceError, match="no such device"):
        plan_engine(tiny_config(tmp_path, device="abacus"))


def test_every_choice_says_why(tmp_path: Path) -> None:
    plan = plan_engine(tiny_config(tmp_path, device="cuda:h200"))
    (attention,) = [choice for choice in plan.kernels if choice.op == "paged_attention"]
    assert attention.passed_over and all(reason for _, reason in attention.passed_over)
