"""Two sides of one model: they agree where both are right, and every call satisfies its oracle on the inputs that a model gives it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pagoda.hal.discovery import find
from pagoda.hal.table import KernelPolicy
from pagoda.models.direct import DirectRun
from pagoda.models.load import describe, load_model
from pagoda.ops.call_check import Verdict
from pagoda.ops.table import kernel_table
from pagoda.serving.cli.diff import told
from pagoda.serving.cli.main import main
from pagoda.serving.cli.side_by_side import Side, compare_sides, open_side, run_texts
from pagoda.serving.conformance.tiny_models import TINY
from tiny_checkpoints import make

PROMPTS = [[(7 * length + 31 * i * i) % 250 for i in range(length)] for length in (1, 7, 33)]
KINDS = (
    "grouped queries, rotation, gated feed-forward", "norms of q and k", "sandwich norms, soft caps, windows", "attention by distance",
    "sinks, biased experts with a clamped gate", "layer norm, learned positions, plain feed-forward",
    "sublayers side by side, angles in pairs",
)  # fmt: skip


def side(device: str, kind: str, dtype: str = "float32") -> Side:
    return open_side(find(device), 0, KernelPolicy(), TINY[kind], dtype)[0]


@pytest.mark.parametrize("kind", KINDS)
def test_two_devices_agree(kind: str) -> None:
    found = compare_sides((side("cpu", kind), side("reference", kind)), PROMPTS, 2)
    assert found.parted is None and len(found.stages) == 3 * (found.layers + 2)
    assert max(stage.error for stage in found.stages) > 0, "kernels and references are never the same to the last bit in all of it"
    assert "agree in 3 steps and 3 layers" in told(found, ("cpu", "reference"))[0]


@pytest.mark.parametrize(("kind", "dtype"), [(KINDS[0], "bfloat16"), (KINDS[0], "float32"), (KINDS[4], "float32")])
def test_every_call_is_judged_and_right(kind: str, dtype: str) -> None:
    one, judged = side("cpu", kind, dtype), list[Verdict]()
    one.judge.tell = judged.append
    one.judged_parts = range(-1, 4)
    run_texts(one, PROMPTS, [[*prompt, 5, 9] for prompt in PROMPTS])
    assert not [verdict for verdict in judged if verdict.problem]
    names = {verdict.kernel.op for verdict in judged}
    assert {"embedding", "paged_attention"} <= names and max(verdict.error for verdict in judged) > 0
    assert all(verdict.error <= verdict.allowed and verdict.inputs for verdict in judged)


def test_watching_changes_nothing() -> None:
    watched = run_texts(side("cpu", KINDS[0]), PROMPTS, PROMPTS)[0][-1]
    device = find("cpu").open()
    table = kernel_table(find("cpu"), device.info)
    plain = DirectRun(load_model(describe(TINY[KINDS[0]], dtype="float32", table=table), device, table), device, 3, 33)
    assert torch.equal(watched, plain.logits(plain.step(list(enumerate(PROMPTS))).hidden))


def test_the_command_on_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(tmp_path, "Qwen3", head_dim=8)
    assert main(["diff", str(tmp_path), "--device", "cpu", "--tokens", "1"]) == 0
    assert "cpu and reference agree in 2 steps" in capsys.readouterr().out


def test_what_cannot_be_compared_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(tmp_path, "T5ForConditionalGeneration", d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0)
    assert main(["diff", str(tmp_path), "--device", "cpu"]) == 2
    assert main(["diff", str(tmp_path), "--device", "null:h200"]) == 2
    assert main(["diff", str(tmp_path), "--kernel", "gemm"]) == 2
    told = capsys.readouterr().err
    assert "one stack of layers" in told and "a model of device" in told and "OP=NAME" in told
