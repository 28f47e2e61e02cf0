"""What bfloat16's bounds let through of recurrent models, whose rounding errors grow along a text: them, and no mistake in a state."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from pagoda.hal.discovery import find
from pagoda.serving.cli.parity_run import check
from recorded_checkpoints import ROOT, Change, record, with_tensors

sys.path.insert(0, str(ROOT / "ci"))
from bfloat16_margins import DRAWS, stochastic

PROMPTS = {"p0": [5], "p1": [9, 40, 17, 88, 23, 70, 31], "p2": list(range(60, 110)), "b0": [7, 8, 9] * 4, "b1": [100, 50, 25, 12] * 5}
STEPS = 12
KINDS = {
    "KimiLinear": {
        "hidden_size": 64, "num_hidden_layers": 3, "kv_lora_rank": 16, "q_lora_rank": None, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
        "v_head_dim": 16, "num_key_value_heads": 4, "linear_num_heads": 2, "linear_head_dim": 16, "num_experts": 8,
        "num_experts_per_token": 2, "moe_intermediate_size": 32, "routed_scaling_factor": 2.446,
        "layer_types": ["linear_attention", "linear_attention", "full_attention"], "mlp_layer_types": ["dense", "sparse", "sparse"],
    },
    "Zamba2": {
        "hidden_size": 64, "num_hidden_layers": 3, "layers_block_type": ["linear_attention", "linear_attention", "hybrid"],
        "hybrid_layer_ids": [2], "mamba_d_state": 16, "n_mamba_heads": 8, "mamba_ngroups": 1, "num_key_value_heads": 4, "adapter_rank": 8,
        "hidden_act": "gelu",
    },
}  # fmt: skip


@pytest.fixture(scope="module", params=list(KINDS))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp(request.param), request.param, PROMPTS, STEPS, **KINDS[request.param])


def no_gate_bias(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(tensor) if "dt_bias" in name else tensor


def dropped_state(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """It decays to nothing before each token."""
    return torch.full_like(tensor, 9.0) if "A_log" in name else tensor


def lost_tap(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The convolution does not see the oldest of its tokens."""
    return torch.cat([torch.zeros_like(tensor[..., :1]), tensor[..., 1:]], -1) if "conv1d.weight" in name else tensor


@pytest.mark.heavy
def test_the_models_pass(checkpoint: Path) -> None:
    report = check(checkpoint, find("cpu"), dtype="bfloat16")
    assert report.passed, str(report)


@pytest.mark.heavy
@pytest.mark.parametrize("mistake", [no_gate_bias, dropped_state, lost_tap])
def test_a_mistake_in_the_recurrence_is_found(mistake: Change, checkpoint: Path, tmp_path: Path) -> None:
    report = check(with_tensors(checkpoint, tmp_path / "wrong", mistake), find("cpu"), dtype="bfloat16")
    assert not report.passed and not report.error
    assert [finding.name for finding in report.findings if not finding.passed and finding.name.startswith(("rows that", "half of"))]


@pytest.mark.heavy
def test_several_draws_allow_no_less_than_one(checkpoint: Path) -> None:
    measured = json.loads((checkpoint / "bfloat16.json").read_text())
    runs = [measured["rows"], *measured["draws"]]
    assert len(runs) == 1 + DRAWS and {len(run) for run in runs} == {STEPS * len(PROMPTS) + len(PROMPTS["p2"])}
    assert abs(measured["error"] - max(map(max, runs))) < 1e-4
    assert all(run != measured["rows"] for run in measured["draws"]), "another rounding is another error"
    assert measured["typical"] < measured["error"]


def test_stochastic_rounding_goes_to_both_neighbours_and_is_right_on_average() -> None:
    draw = torch.Generator().manual_seed(0)
    exact = torch.tensor([1.0, -1.5, 0.0, 3.0e-3]).bfloat16().float()
    assert torch.equal(stochastic(exact, draw).float(), exact), "what bfloat16 has stays"
    between = torch.tensor([1 + 2**-9, -(1 + 3 * 2**-9)]).repeat(20000, 1)  # a quarter and three quarters of the way
    rounded = stochastic(between, draw).double()
    assert set(rounded[:, 0].tolist()) == {1.0, 1 + 2**-7} and set(rounded[:, 1].tolist()) == {-1.0, -1 - 2**-7}
    torch.testing.assert_close(rounded.mean(0), between[0].double(), rtol=0, atol=2e-4)
