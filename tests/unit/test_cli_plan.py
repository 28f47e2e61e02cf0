"""`pagoda plan`: its bars and words, and the record against the plan it prints."""

from __future__ import annotations

import io
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pagoda.serving.cli.main import main
from pagoda.serving.cli.plan_view import bar, grouped, record, show, size
from pagoda.serving.engine.config import EngineConfig
from pagoda.serving.engine.engine_plan import EnginePlan, plan_engine
from rich.console import Console

PARTS = ("weights", "work", "kv", "reserved", "free")


@pytest.fixture(scope="module")
def plan() -> EnginePlan:
    return plan_engine(EngineConfig(device="null:h200", max_model_len=4096))


@settings(deadline=None)
@given(st.lists(st.integers(0, 10**12), min_size=5, max_size=5), st.integers(20, 200))
def test_a_bar_fills_its_width_and_shows_whatever_is_there(amounts: list[int], width: int) -> None:
    drawn = bar(dict(zip(PARTS, amounts, strict=True)), sum(amounts), width)
    assert len(drawn.plain) == (width if any(amounts) else 0)
    assert len(drawn.spans) == sum(amount > 0 for amount in amounts)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1024, "1.0 KiB"), (384 * 2**20, "384.0 MiB"), (5 * 2**40, "5.0 TiB")],
)
def test_sizes(nbytes: int, text: str) -> None:
    assert size(nbytes) == text


def test_the_record_is_json_and_adds_up(plan: EnginePlan) -> None:
    found = json.loads(json.dumps(record(plan), allow_nan=False))
    memory = found["memory"]
    assert sum(memory[name] for name in PARTS) == memory["total"] == plan.memory.total
    assert sum(found["weights"].values()) == memory["weights"] and sum(found["work"].values()) == memory["work"]
    assert len(found["kernels"]) == len(plan.kernels) and found["kernels"][0]["kernel"] == plan.kernels[0].chosen.name
    assert found["device"]["model"] == "h200" and found["config"]["max_model_len"] == 4096


def test_the_view_names_what_there_is(plan: EnginePlan) -> None:
    out = io.StringIO()
    show(plan, Console(file=out, width=120))
    text = out.getvalue()
    for part in (
        "h200",
        "LlamaForCausalLM",
        "134.5 M",
        "KV cache",
        f"{plan.tokens:,}",
        "4,096 tokens (the model's limit is 8,192",
        "not here",
    ):
        assert part in text
    for use in grouped(plan.kernels):
        assert use.op in text and use.kernel in text
        assert all(kernel in text for kernel, _ in use.passed_over)
    assert sum(use.times for use in grouped(plan.kernels)) == len(plan.kernels)
    for fused in plan.fusions:
        assert fused.op in text and all(reason in text for reason, _ in fused.apart)


def test_fusions_are_counted_with_their_reasons() -> None:
    plan = plan_engine(EngineConfig(device="cuda:h200", max_model_len=4096))
    sums, products, writes = plan.fusions
    assert (sums.op, sums.times, sums.apart) == ("add_rms_norm", 60, ())  # SmolLM2: 30 layers, whose first norm follows no addition
    assert (products.op, products.times + sum(times for _, times in products.apart)) == ("norm_gemm", 59)
    assert (writes.op, writes.times, writes.apart) == ("rope_write", 30, ())
    assert {"rope_write", "add_rms_norm"} <= {choice.op for choice in plan.kernels if choice.chosen.name != "reference"}
    here = plan_engine(EngineConfig(device="reference", max_model_len=256))
    assert [(fused.times, [times for _, times in fused.apart]) for fused in here.fusions] == [(0, [60]), (0, [59]), (0, [30])]
    found = json.loads(json.dumps(record(here)))["fusions"]
    assert found[2]["apart"] == [{"reason": "no kernel but the reference here", "times": 30}]


def test_the_command_prints_either(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--device", "null:h100", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["device"]["model"] == "h100"
    assert main(["plan", "--device", "null:h100"]) == 0
    assert "Kernels" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--device", "nope"], 1, "no such device 'nope'; installed backends:"),
        (["--device", "null:nope"], 1, "nope"),
        (["./nowhere"], 2, "model ./nowhere: there is no such file or folder"),
        (["nonsense"], 2, "model 'nonsense' is no file, no folder"),
        (["--max-num-seqs", "0"], 2, "max_num_seqs=0 must be at least 1"),
        (["--kernel", "paged_attention=warp"], 1, "warp"),
        (["--device", "null:l40s", "--kv-cache-memory-bytes", "900G"], 1, ""),
    ],
)
def test_what_cannot_work_is_one_line(capsys: pytest.CaptureFixture[str], words: list[str], code: int, message: str) -> None:
    assert main(["plan", *words]) == code
    err = capsys.readouterr().err
    assert err.startswith("pagoda: ") and message in err and err.count("\n") == 1
