"""How many kernels a recurrent layer's mixer launches in a decode step: what lies around a recurrence belongs into its primitives."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from launches import Launches
from pagoda.hal.discovery import find
from pagoda.hal.table import KernelTable
from pagoda.models.direct import DirectRun
from pagoda.models.load import describe, load_model, open_checkpoint
from pagoda.ops.references import reference_kernels
from tiny_checkpoints import make

DELTA = {
    "num_hidden_layers": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 20,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "head_dim": 16,
}  # fmt: skip
KIMI = {
    "kv_lora_rank": 16, "q_lora_rank": None, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12, "num_key_value_heads": 4,
    "linear_num_heads": 4, "linear_head_dim": 8, "num_experts": 4, "num_experts_per_token": 2, "moe_intermediate_size": 24,
    "num_hidden_layers": 3, "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "mlp_layer_types": ["dense"] * 3,
}  # fmt: skip
NEMOTRON = {
    "layers_block_type": ["linear_attention", "linear_attention", "mlp"], "mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2,
    "ssm_state_size": 6, "chunk_size": 8, "head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
}  # fmt: skip
CASES: dict[str, tuple[dict[str, Any], dict[str, int], int]] = {
    "Qwen3Next": (DELTA, {"gemm": 2, "causal_conv1d": 1, "gated_delta_rule": 1, "gated_norm": 1}, 0),
    "KimiLinear": (KIMI, {"gemm": 5, "causal_conv1d": 1, "gated_delta_rule": 1, "gated_norm": 1}, 2),
    "NemotronH": (NEMOTRON, {"gemm": 2, "causal_conv1d": 1, "ssd_scan": 1, "gated_norm": 1}, 0),
}
"""Sizes; the primitives of the second layer's mixer; and torch's operators around them, copies of latents that lie side by side."""


class Seen:
    """A mixer whose launches alone are counted."""

    def __init__(self, mixer: Any, launches: Launches) -> None:
        self._mixer, self._launches = mixer, launches

    def __call__(self, x: torch.Tensor, step: Any) -> torch.Tensor:
        with self._launches:
            result: torch.Tensor = self._mixer(x, step)
        return result


def launched(folder: Path) -> Counter[str]:
    """By the second layer's mixer, of a decode step of two requests."""
    launches, device = Launches(), find("reference").open(0)
    table = KernelTable(device.info, reference_kernels(), wrap=launches.wrap)
    model: Any = load_model(describe(open_checkpoint(folder), dtype="bfloat16", table=table), device, table)
    run = DirectRun(model, device, 2, 64)
    run.step([(0, [3] * 9), (1, [4] * 5)])
    model._layers[1].mixer = Seen(model._layers[1].mixer, launches)
    launches.seen.clear()
    run.step([(0, [5]), (1, [7])])
    return launches.seen


@pytest.mark.parametrize("name", CASES)
def test_a_mixer_launches_its_primitives_and_hardly_more(name: str, tmp_path: Path) -> None:
    sizes, primitives, others = CASES[name]
    make(tmp_path, name, **sizes)
    seen = launched(tmp_path)
    found = {op.removeprefix("primitive "): count for op, count in seen.items() if count and op.startswith("primitive ")}
    around = {op: count for op, count in seen.items() if not op.startswith("primitive ")}
    assert (found, sum(around.values())) == (primitives, others), (found, around)
