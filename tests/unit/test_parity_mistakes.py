"""What bfloat16's bounds let through: experts that rounding turns, and none of three mistakes of a model's code."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pagoda.hal.discovery import find
from pagoda.serving.cli.parity_run import Report, check
from pagoda.serving.conformance.comparison import Finding, Tolerance, compare_beside, compare_paired
from recorded_checkpoints import record, with_tensors

LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}
EXPERTS = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 2, "topk_group": 1}
DEEPSEEK = {
    **LATENT, **EXPERTS, "hidden_size": 64, "num_hidden_layers": 3, "num_key_value_heads": 4, "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}  # fmt: skip
PROMPTS = {"p0": [5], "p1": [9, 40, 17, 88, 23, 70, 31], "p2": list(range(60, 110)), "b0": [7, 8, 9] * 4, "b1": [100, 50, 25, 12] * 5}
STEPS = 12


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """DeepSeek V3 in weights that bfloat16 has, its router biased, with recorded answers and what transformers is off by in bfloat16."""
    draw = torch.Generator().manual_seed(1)

    def biased(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return torch.randn(tensor.shape, generator=draw) * 0.1 if "correction_bias" in name else tensor

    return record(tmp_path_factory.mktemp("deepseek"), "DeepseekV3", PROMPTS, STEPS, biased, **DEEPSEEK)


def judged(folder: Path) -> Report:
    return check(folder, find("cpu"), dtype="bfloat16")


def wrong_base(source: Path, target: Path) -> Path:
    """Its rotation turns at other speeds."""
    shutil.copytree(source, target)
    config = json.loads((target / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] *= 10
    (target / "config.json").write_text(json.dumps(config))
    return target


def no_shared_expert(source: Path, target: Path) -> Path:
    return with_tensors(source, target, lambda name, t: torch.zeros_like(t) if "shared_experts.down_proj" in name else t)


def no_router_bias(source: Path, target: Path) -> Path:
    """Experts are chosen by their scores alone."""
    return with_tensors(source, target, lambda name, t: torch.zeros_like(t) if "correction_bias" in name else t)


@pytest.mark.heavy
def test_the_model_itself_passes_although_rounding_turns_experts(checkpoint: Path) -> None:
    measured = json.loads((checkpoint / "bfloat16.json").read_text())
    report = judged(checkpoint)
    assert report.passed, str(report)
    assert measured["error"] > 0.5, "rounding turns an expert somewhere, so that no bound of single rows can be narrow"
    assert len(measured["rows"]) == STEPS * len(PROMPTS) + len(PROMPTS["p2"])


@pytest.mark.heavy
@pytest.mark.parametrize("mistake", [wrong_base, no_shared_expert, no_router_bias])
def test_a_mistake_of_the_code_is_found(mistake: Callable[[Path, Path], Path], checkpoint: Path, tmp_path: Path) -> None:
    report = judged(mistake(checkpoint, tmp_path / "wrong"))
    assert not report.passed and not report.error
    assert [finding.name for finding in report.findings if not finding.passed and finding.name.startswith(("rows that", "half of"))]


def test_as_many_rows_may_turn_as_in_the_oracle_and_few_more() -> None:
    near, measured = torch.full((200,), 0.05, dtype=torch.float64), Tolerance(error=9.0, tie=9.0, typical=0.1)

    def far(*rows: range) -> torch.Tensor:
        return near.index_fill(0, torch.tensor([row for part in rows for row in part]), 3.0)

    def beside(rows: torch.Tensor, *runs: torch.Tensor) -> Finding:
        return compare_beside(rows, torch.stack(runs), measured)

    assert beside(far(range(20)), far(range(20))).error == 0.0
    assert beside(far(range(20)), far(range(40, 60))).passed, "others, but as many"
    assert beside(far(range(5)), far(range(30))).passed
    assert not beside(far(range(40)), far(range(8))).passed
    assert not beside(far(range(10)), near).passed
    assert beside(far(range(20)), near, far(range(20, 40)), far(range(15))).passed, "the oracle had luck once"
    assert not beside(far(range(40)), far(range(8)), near, far(range(40))).passed, "and bad luck once"


def test_rows_may_be_a_little_worse_than_the_oracles_and_not_by_half() -> None:
    draw = torch.Generator().manual_seed(0)
    one, other = (torch.randn(200, generator=draw, dtype=torch.float64).mul(0.6).exp() * 0.1 for _ in range(2))
    assert compare_paired(one, other).passed and compare_paired(1.15 * one, other).passed
    assert not compare_paired(1.9 * one, other).passed
    assert compare_paired(one.index_fill(0, torch.arange(40), 3.0), other).passed, "turned rows are judged by their number"
