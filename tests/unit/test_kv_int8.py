"""KV pages in int8: what they take, which names ask for them, and how far the default model's answers move."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pagoda import LLM, SamplingParams
from pagoda.hal.errors import ConfigError
from pagoda.hal.kv import CacheKind, LayerCache, stored_dim
from pagoda.ops.attention import from_pages, to_pages
from pagoda.serving.engine.engine_plan import plan_engine
from tiny import tiny_config

TEXT = "The tower of a temple has several roofs, one above the other, each a little smaller than the one below. " * 6


def test_a_head_comes_back_to_half_a_step() -> None:
    x = torch.randn(7, 3, 40, generator=torch.Generator().manual_seed(0))
    x[2, 1] = 0.0
    stored = to_pages(x, torch.int8)
    assert stored.shape == (7, 3, stored_dim(40, "int8")) and stored.dtype == torch.int8
    back = from_pages(stored, torch.float64)
    step = x.abs().amax(-1, keepdim=True).double() / 127
    assert ((back - x.double()).abs() <= step * 0.5001).all()
    assert torch.equal(back[2, 1], torch.zeros(40).double())


def test_pages_take_a_byte_a_number_and_four_a_head() -> None:
    cache = LayerCache(CacheKind.FULL, 3, stored_dim(64, "int8"), stored_dim(64, "int8"), "int8")
    assert cache.bytes_per_token == 3 * 2 * (64 + 4)
    assert stored_dim(0, "int8") == 0 and stored_dim(64, "bfloat16") == 64


@pytest.mark.parametrize("name", ["int8", "int8_per_token_head"])
def test_the_plan_holds_twice_the_tokens(tmp_path: Path, name: str) -> None:
    room = {"kv_cache_memory_bytes": 4 << 20, "num_gpu_blocks_override": None, "dtype": "bfloat16"}
    plain, small = (plan_engine(tiny_config(tmp_path, kv_cache_dtype=dtype, **room)) for dtype in ("auto", name))
    assert (plain.kv_dtype, small.kv_dtype) == ("bfloat16", "int8")
    assert small.memory.page_bytes < plain.memory.page_bytes
    assert small.tokens > 1.3 * plain.tokens  # heads of 16 here: 20 bytes for 32


@pytest.mark.parametrize("name", ["fp8_e5m2", "nvfp4", "int4"])
def test_other_small_dtypes_are_refused_by_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=f"KV cache of {name} was asked for; there are auto, .*int8"):
        plan_engine(tiny_config(tmp_path, kv_cache_dtype=name))


@pytest.mark.heavy
def test_the_default_models_answers_stay() -> None:
    params = SamplingParams(temperature=0, max_tokens=8, prompt_logprobs=0, ignore_eos=True)
    found = []
    for dtype in ("auto", "int8"):
        with LLM(device="cpu", kv_cache_dtype=dtype, kv_cache_memory_bytes=64 << 20, max_num_seqs=2, max_num_batched_tokens=64) as llm:
            [output] = llm.generate(TEXT, params, use_tqdm=False)
            scores = [next(iter(entry.values())).logprob for entry in output.prompt_logprobs if entry]
            found.append((torch.tensor(scores), output.outputs[0].token_ids))
    (plain, tokens), (small, others) = found
    difference = (plain - small).abs()
    assert len(plain) > 100 and difference.max() > 0  # it was another cache
    assert difference.mean() < 0.03 and difference.max() < 0.5, (difference.mean(), difference.max())
    assert tokens[:4] == others[:4]
