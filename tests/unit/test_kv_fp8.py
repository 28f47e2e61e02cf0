"""KV pages in float8: what they take, the scales of a checkpoint, and how far answers move."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from pagoda import LLM, SamplingParams
from pagoda.hal.discovery import find
from pagoda.hal.table import KernelPolicy
from pagoda.models.direct import DirectRun
from pagoda.models.load import describe, load_model, open_checkpoint
from pagoda.ops.attention import from_pages, to_pages
from pagoda.ops.table import kernel_table
from pagoda.serving.engine.engine_plan import plan_engine
from safetensors.torch import save_file
from tiny import tiny_config

PROMPT = [5, 3, 80, 22, 9, 41, 77, 5, 60, 31]


def test_numbers_come_back_to_half_a_step_and_large_ones_as_the_largest() -> None:
    x = torch.randn(500, generator=torch.Generator().manual_seed(0)) * 30
    back = from_pages(to_pages(x, torch.float8_e4m3fn), torch.float64)
    assert ((back - x.double()).abs() <= x.abs().double() / 16 + 2.0**-10).all()
    assert to_pages(torch.tensor([1e4, -1e4]), torch.float8_e4m3fn).float().tolist() == [448.0, -448.0]


@pytest.mark.parametrize("name", ["fp8", "fp8_e4m3"])
def test_the_plan_holds_twice_the_tokens(tmp_path: Path, name: str) -> None:
    room = {"kv_cache_memory_bytes": 4 << 20, "num_gpu_blocks_override": None, "dtype": "bfloat16"}
    plain, small = (plan_engine(tiny_config(tmp_path, kv_cache_dtype=dtype, **room)) for dtype in ("auto", name))
    assert (small.kv_dtype, small.memory.page_bytes * 2) == ("float8_e4m3fn", plain.memory.page_bytes)
    assert small.tokens >= 1.9 * plain.tokens


def checkpoint(folder: Path, loud: float, scales: dict[str, float], spelling: str) -> Path:
    """A tiny Llama whose values are `loud` times as large, and the output projections so much smaller."""
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(3)
    model = transformers.LlamaForCausalLM._from_config(transformers.LlamaConfig(**sizes, num_hidden_layers=2)).float()
    tensors = {}
    for name, weight in model.state_dict().items():
        more = torch.randn(weight.shape) * 0.1
        tensors[name] = (weight + more) * (loud if "v_proj" in name else 1 / loud if "o_proj" in name else 1.0)
    for layer in range(2):
        tensors |= {f"model.layers.{layer}.self_attn.{spelling.format(x=x)}": torch.tensor(scale) for x, scale in scales.items()}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(model.config.to_dict() | {"architectures": ["LlamaForCausalLM"]}))
    save_file(tensors, folder / "model.safetensors")
    return folder


def logits(path: Path, kv_dtype: str, joined: bool = False) -> torch.Tensor:
    """`joined`: rotation and the write to the cache are one kernel."""
    backend = find("reference")
    device = backend.open(0)
    table = kernel_table(backend, device.info, KernelPolicy({"rope_write": "reference"} if joined else {}))
    model = load_model(describe(open_checkpoint(path), dtype="float32", kv_dtype=kv_dtype, table=table), device, table)
    run = DirectRun(model, device, 1, 64)
    return run.logits(run.step([(0, PROMPT)]).hidden)


@pytest.mark.parametrize("spelling", ["{x}_scale", "attn.{x}_scale", "{x}_proj.{x}_scale", "{x}_proj.output_scale"])
def test_scales_of_a_checkpoint_bring_loud_values_into_range(spelling: str, tmp_path: Path) -> None:
    scaled = checkpoint(tmp_path / "scaled", 2e3, {"k": 0.25, "v": 40.0}, spelling)
    bare = checkpoint(tmp_path / "bare", 2e3, {}, spelling)
    exact = logits(bare, "auto")
    near, far = (((logits(path, "fp8") - exact).norm() / exact.norm()).item() for path in (scaled, bare))
    assert 0 < near < 0.05 < 0.1 < far
    together = logits(scaled, "fp8", joined=True)
    assert 0 < (together - exact).norm() / exact.norm() < 0.05


@pytest.mark.heavy
def test_the_default_models_answers_stay() -> None:
    text = "The tower of a temple has several roofs, one above the other, each a little smaller than the one below. "
    params = SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=0, ignore_eos=True)
    found = []
    for dtype in ("auto", "fp8"):
        with LLM(device="cpu", kv_cache_dtype=dtype, kv_cache_memory_bytes=64 << 20, max_num_seqs=2, max_num_batched_tokens=64) as llm:
            [output] = llm.generate(text * 2, params, use_tqdm=False)
            found.append(torch.tensor([next(iter(entry.values())).logprob for entry in output.prompt_logprobs if entry]))
    difference = (found[0] - found[1]).abs()
    assert len(difference) > 30 and difference.max() > 0  # it was another cache
    assert difference.mean() < 0.1, difference.mean()
