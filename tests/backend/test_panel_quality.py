"""What prompts lose by integers: logprobs of the default model with its blocks' numbers as they are, and by panels of 13 bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pagoda import LLM, SamplingParams
from pagoda.backends.cpu.backend import CpuBackend
from pagoda.backends.cpu.kernels import cpu_kernels

TEXT = (Path(__file__).parents[2] / "LICENSE").read_text()[600:3100]
PANELS = {"gemm_gguf": "native_prompt", "paged_attention": "native_prompt"}
EXACT = {"gemm_gguf": "reference", "paged_attention": "reference"}


def _scores(**kernels: str) -> torch.Tensor:
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    settings: dict[str, Any] = {"kv_cache_memory_bytes": 64 << 20, "max_num_seqs": 2, "max_num_batched_tokens": 1024}
    with LLM(device="cpu", dtype="float32", kernel=kernels, **settings) as llm:
        [output] = llm.generate(TEXT, params, use_tqdm=False)
    return torch.tensor([next(iter(entry.values())).logprob for entry in output.prompt_logprobs if entry])


def _here(op: str, name: str) -> bool:
    [kernel] = (kernel for kernel in cpu_kernels() if (kernel.op, kernel.name) == (op, name))
    return CpuBackend().describe().arch in kernel.needs.archs


@pytest.mark.heavy
def test_integers_move_logprobs_by_little() -> None:
    panels = {op: name for op, name in PANELS.items() if _here(op, name)}
    moved = (_scores(**panels) - _scores(**EXACT)).abs()
    print(f"{moved.mean():.5f} in the mean, {moved.max():.5f} at most")
    assert len(moved) > 450
    assert moved.mean() < 0.005 and moved.max() < 0.1
    assert moved.max() > 1e-5 or not panels  # it was another computation
