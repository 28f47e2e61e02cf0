"""Whole hybrids on the Triton kernels, in Triton's interpreter: an engine answers as it does on the references."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from interpreted_chip import NAME, answers, has_triton
from tiny_checkpoints import make

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 20}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "head_dim": 16}
STATES = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 6, "mamba_n_groups": 2, "mamba_chunk_size": 8}
KIMI = {
    "kv_lora_rank": 16, "q_lora_rank": None, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12, "num_key_value_heads": 4,
    "linear_num_heads": 2, "linear_head_dim": 8, "num_experts": 4, "num_experts_per_token": 2, "moe_intermediate_size": 24,
    "layer_types": ["linear_attention", "full_attention"], "mlp_layer_types": ["dense", "dense"],
}  # fmt: skip
ATTENTION = {"paged_attention", "causal_conv1d"}
CASES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "Bamba": ({**STATES, "attn_layer_indices": [1]}, ATTENTION | {"ssd_scan", "gated_norm"}),
    "Qwen3Next": ({**EXPERTS, **DELTA, "num_hidden_layers": 4, "decoder_sparse_step": 2}, ATTENTION | {"gated_delta_rule", "moe_mlp"}),
    "KimiLinear": (KIMI, {"causal_conv1d", "gated_delta_rule", "gated_norm"}),
    "Jamba": ({"num_hidden_layers": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 1}, ATTENTION | {"selective_scan"}),
    "Rwkv": ({"attention_hidden_size": 48, "intermediate_size": 80, "rescale_every": 0}, {"wkv"}),
}


@pytest.mark.heavy
@pytest.mark.parametrize("name", CASES)
def test_a_hybrid_answers_as_on_the_references(name: str, tmp_path: Path, require: Callable[[str, bool], None]) -> None:
    """Prompts in pieces and more requests than run at once, so that states are kept, read again and let go."""
    require("Triton (make test-kernels installs it)", has_triton())
    sizes, ops = CASES[name]
    folder, plugin = tmp_path / "model", tmp_path / "plugin"
    plugin.mkdir()
    make(folder, name, **sizes)
    wanted, got = (answers(folder, plugin, device) for device in ("reference", NAME))
    assert {op: got["kernels"][op] for op in ops} == dict.fromkeys(ops, "triton")
    assert {wanted["kernels"][op] for op in ops} == {"reference"}
    assert got["tokens"] == wanted["tokens"]
    for ours, theirs in zip(got["best"], wanted["best"], strict=True):
        assert ours == pytest.approx(theirs, abs=2e-3)
