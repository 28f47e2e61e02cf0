"""`pagoda parity`, over a checkpoint whose reference transformers made here; and that it is red when the reference says otherwise."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from pagoda.serving.cli.main import main
from pagoda.serving.conformance.comparison import Tolerance, compare_greedy, compare_typical, compare_values
from safetensors.torch import load_file, save_file
from tiny_checkpoints import logits, make
from tokenizers import Tokenizer, models

PROMPTS = {"p0": [5], "p1": [9, 40, 17, 88, 23, 70, 31], "p2": list(range(60, 93)), "b0": [7, 8, 9], "b1": [100, 50, 25, 12]}
STEPS = 6


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    model = make(tmp_path, "Qwen3", head_dim=16)
    Tokenizer(models.WordLevel({f"w{i}": i for i in range(131)}, unk_token="w0")).save(str(tmp_path / "tokenizer.json"))
    reference: dict[str, torch.Tensor] = {}
    for name, prompt in PROMPTS.items():
        ids, rows = list(prompt), []
        for _ in range(STEPS):
            rows.append(logits(model, ids)[-1])
            ids.append(int(rows[-1].argmax()))
        found = {"prompt": torch.tensor(prompt), "tokens": torch.tensor(ids[len(prompt) :]), "logits": torch.stack(rows)}
        reference |= {f"{name}.{kind}": tensor for kind, tensor in found.items()}
    reference["p2.full_logits"] = logits(model, PROMPTS["p2"])
    save_file(reference, tmp_path / "reference.safetensors")
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = main(["parity", "--device", "reference", *words])
    return code, capsys.readouterr().out


def test_a_checkpoint_that_agrees_passes_through_model_and_engine(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run(capsys, "--json", str(checkpoint))
    [report] = json.loads(out)
    assert code == 0 and report["passed"]
    names = {finding["name"] for finding in report["findings"]}
    assert {"p2.tokens", "b1.logits", "p2.full_logits", "b0.engine.tokens", "p1.engine.logprobs", "p2.engine.prompt_logprobs"} <= names


@pytest.mark.parametrize("tensor", ["p1.logits", "p2.full_logits", "b1.logits"])
def test_a_reference_that_says_otherwise_fails_and_is_named(tensor: str, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reference = load_file(checkpoint / "reference.safetensors")
    reference[tensor] = reference[tensor] * 1.05
    save_file(reference, checkpoint / "reference.safetensors")
    code, out = run(capsys, str(checkpoint))
    assert code == 1 and out.startswith("FAIL") and tensor in out


def test_bfloat16_is_run_and_judged_by_its_own_bounds(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out = run(capsys, "--dtype", "bfloat16", "--json", str(checkpoint))
    [report] = json.loads(out)
    rows = [finding for finding in report["findings"] if finding["name"].endswith("logits")]
    assert max(finding["error"] for finding in rows) > 1e-3, "this is not float32"
    assert all(finding["passed"] == (finding["error"] <= 0.1) for finding in rows)
    code, _ = run(capsys, "--dtype", "bfloat16", "--tolerance", "1", "--tie", "1", str(checkpoint))
    assert code == 0


def test_a_folder_without_reference_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run(capsys, str(tmp_path))
    assert code == 1 and "there is no reference.safetensors" in out


def test_near_ties_pass_and_end_the_comparison() -> None:
    want = torch.tensor([[0.0, 2.0, 1.99], [5.0, 0.0, 0.0], [0.0, 0.0, 3.0]])
    got = torch.tensor([[0.0, 1.99, 2.0], [0.0, 9.0, 0.0], [9.0, 0.0, 0.0]])
    tokens, values = compare_greedy("p", [2, 1, 0], got, [1, 0, 2], want, Tolerance(error=0.1, tie=0.02))
    assert tokens.passed and "tie" in tokens.note
    assert values.passed and values.compared == 1
    tokens, _ = compare_greedy("p", [2, 1, 0], got, [1, 0, 2], want, Tolerance(error=0.1, tie=0.001))
    assert not tokens.passed
    tokens, _ = compare_greedy("p", [1], got[:1], [1, 0, 2], want, Tolerance())
    assert not tokens.passed and tokens.note == "only 1 of 3 tokens"


def test_rows_may_be_far_off_where_half_of_them_are_near() -> None:
    want = torch.randn(21, 30, generator=torch.Generator().manual_seed(0))
    measured = Tolerance(error=4.0, typical=0.1)
    for spoiled, passed in ((10, True), (11, False)):
        got = want + 0.01
        got[:spoiled] += 2.0
        finding = compare_values("x", got, want, measured)
        assert finding.passed and compare_typical([finding, finding], measured).passed is passed
    assert not compare_typical([compare_greedy("p", [0], want, [0], want, measured)[0]], measured).passed, "nothing was compared"


def test_where_the_oracle_was_measured_half_of_all_rows_have_to_be_near(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (checkpoint / "float32.json").write_text(json.dumps({"error": 0.5, "typical": 0.0, "lead": 0.0}))
    code, out = run(capsys, "--json", str(checkpoint))
    [typical] = [finding for finding in json.loads(out)[0]["findings"] if finding["name"] == "half of all rows"]
    assert code == 0 and typical["passed"] and 0 < typical["error"] < 1e-3 and typical["compared"] > 5
    reference = load_file(checkpoint / "reference.safetensors")
    save_file({n: t * 1.05 if "logits" in n else t for n, t in reference.items()}, checkpoint / "reference.safetensors")
    code, out = run(capsys, str(checkpoint))
    assert code == 1 and out.count("off by") == 1 and "half of all rows: off by" in out


def test_errors_are_relative_to_the_spread_of_the_reference() -> None:
    want = torch.randn(20, 30, generator=torch.Generator().manual_seed(0)) * 10
    finding = compare_values("x", want + 0.02, want, Tolerance(error=1e-3))
    assert not finding.passed and finding.error == pytest.approx(0.002, rel=0.1)
    assert compare_values("x", want + 0.005, want, Tolerance(error=1e-3)).passed
    assert not compare_values("x", want[:3], want, Tolerance()).passed
    assert compare_values("x", torch.full_like(want, float("nan")), want, Tolerance()).note == "not finite"
