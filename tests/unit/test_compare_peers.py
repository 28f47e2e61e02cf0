"""`pagoda bench compare-peers`: turns of real processes under both generators, the record that is gone on with, ratios by hand."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest
import toy_process
from pagoda.hal.errors import ConfigError, PagodaError
from pagoda.serving.cli.bench import compare_peers
from pagoda.serving.cli.bench.peers import engines
from pagoda.serving.cli.bench.peers.comparison import Comparison, as_markdown
from pagoda.serving.cli.bench.peers.engines import PORT, Engine
from pagoda.serving.cli.bench.peers.generators import generator
from pagoda.serving.cli.bench.peers.rows import BY_NAME, Load, Seen, chosen
from pagoda.serving.cli.bench.peers.turn import take_turn
from pagoda.serving.cli.bench.process_tree import Busy, pss_mib, tree
from pagoda.serving.cli.main import main

FLAGS = '{"host": "127.0.0.1", "port": ' + PORT + ', "served_model_name": ["m"]}'
SMALL = tuple(row for row in chosen(("batch1", "requests16")))

THEIRS = """
import neighbour
def bench(url, model, prompt_len, gen_len, concurrency, requests, repeats, shared=0, vocab=0, silent=False):
    return [{"failed": neighbour.FAILED, "errors": ["no"], "tpot_p50_ms": gen_len, "ttft_p50_ms": shared, "output_tps": requests}]
"""


def toy(delay: float) -> Engine:
    return Engine("toy", "1", (sys.executable, toy_process.__file__, FLAGS, str(delay)))


def test_a_turn_of_a_server() -> None:
    turn = take_turn(toy(0.004), SMALL, generator(None), 200)
    assert list(turn.values) == ["batch1", "requests16", "start", "memory"]
    assert turn.values["batch1"] > 0
    assert 0 < turn.values["requests16"] <= 16 / 0.004
    assert 20 < turn.values["memory"] < 1000 and turn.values["start"] > 0.1


def test_an_engine_that_does_not_start_shows_its_log() -> None:
    broken = Engine("broken", "1", (sys.executable, "-c", f"raise SystemExit('no weights for {PORT}')"))
    with pytest.raises(PagodaError, match=r"broken: the server ended with 1\nno weights for \d+"):
        take_turn(broken, SMALL, generator(None), 200)


def test_an_engine_that_measures_itself() -> None:
    code = "import time; time.sleep(0.2); print('first token', flush=True); print('{\"batch1\": 3.5}')"
    turn = take_turn(Engine("script", "1", (sys.executable, "-c", code)), SMALL, generator(None), 200)
    assert turn.values["batch1"] == 3.5 and turn.values["start"] >= 0.2


def test_a_generator_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "loadgen.py").write_text(THEIRS)
    (tmp_path / "neighbour.py").write_text("FAILED = 0")
    monkeypatch.setitem(sys.modules, "loadgen", sys)  # both are restored after the test
    generate = generator(str(tmp_path))
    assert generate("http://x", "m", Load(10, 7, 3, 2, 5), 200) == Seen(7, 5, 3)
    monkeypatch.setattr(sys.modules["neighbour"], "FAILED", 2)
    with pytest.raises(PagodaError, match="2 of 3 requests failed: no"):
        generate("http://x", "m", Load(10, 7, 3), 200)
    del sys.modules["neighbour"]
    with pytest.raises(ConfigError, match="no loadgen"):
        generator(str(tmp_path / "absent"))


def comparison() -> Comparison:
    def turn(engine: str, number: int, batch1: float, prefill: float) -> dict[str, object]:
        values = {"batch1": batch1, "prefill": prefill}
        return {"engine": engine, "round": number, "at": "", "others": 0.3 * number, "values": values}

    made = [turn("pagoda", 0, 2.0, 100.0), turn("peer", 0, 4.0, 50.0), turn("peer", 1, 6.0, 60.0), turn("pagoda", 1, 2.0, 30.0)]
    return Comparison("x", {}, {name: {"version": "1", "command": name} for name in ("pagoda", "peer")}, made)


def test_ratios_are_taken_round_by_round_and_above_one_is_ours() -> None:
    assert comparison().ratios("peer", BY_NAME["batch1"]) == (2.5, 2.0, 3.0)
    assert comparison().ratios("peer", BY_NAME["prefill"]) == (1.25, 0.5, 2.0)
    assert comparison().ratios("peer", BY_NAME["prefix"]) is None
    assert comparison().disturbed == ["peer 2", "pagoda 2"]
    lines = as_markdown(comparison()).splitlines()
    assert lines[2] == "| batch 1, ms a token | 2.00 [2.00–2.00] | 5.00 [4.00–6.00] | 2.50 [2.00–3.00]× |" and len(lines) == 4


def test_a_record_is_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    model, record = tmp_path / "x.gguf", tmp_path / "r.json"
    model.write_bytes(b"GGUF")
    monkeypatch.setattr(engines, "pagoda", lambda words: toy(0.0))
    command = ["bench", "compare-peers", str(model), "--cpu", "--rows", "batch1", "--vocab", "200", "--json", str(record)]
    assert main([*command, "--rounds", "2", "--turns", "1"]) == 0
    first = json.loads(record.read_text())["turns"]
    assert main([*command, "--rounds", "2"]) == 0
    assert [turn["round"] for turn in json.loads(record.read_text())["turns"]] == [0, 1]
    assert json.loads(record.read_text())["turns"][:1] == first
    assert "toy 2: batch1" in capsys.readouterr().out
    other = tmp_path / "y.gguf"
    other.write_bytes(b"GGUF")
    assert main(["bench", "compare-peers", str(other), "--cpu", "--json", str(record)]) == 2
    assert "holds a comparison on x.gguf" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "say --cpu"),
        (["--cpu", "--rows", "speed"], "no row 'speed'"),
        (["--cpu", "--rounds", "0"], "must be at least 1"),
        (["--cpu", "--llama-server", "/absent"], "absent does not run"),
        (["--cpu", "--vllm-python", "/absent"], "vLLM needs a folder"),
        (["--cpu", "--transformers"], "transformers needs a folder"),
    ],
)
def test_errors(words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    assert main(["bench", "compare-peers", str(tmp_path / "x.gguf"), *words]) == 2
    assert message in capsys.readouterr().err


def test_rounds_alternate_and_options_of_the_engine_are_passed_on() -> None:
    one, two = Engine("a", "1", ("a",)), Engine("b", "1", ("b",))
    rows = chosen(("batch1",))
    left = compare_peers._left(Comparison("x", {}, {}, []), [one, two], 2, rows)
    assert [(number, engine.name) for number, engine, _ in left] == [(0, "a"), (0, "b"), (1, "b"), (1, "a")]
    taken = {"engine": "a", "round": 0, "at": "", "others": 0, "values": {"batch1": 1.0, "start": 1.0, "memory": 1.0}}
    some = Comparison("x", {}, {}, [taken])
    assert some.missing("a", 0, rows) == () and some.missing("b", 0, rows) == rows
    assert [row.name for row in some.missing("a", 0, chosen(("batch1", "prefill")))] == ["prefill", "start", "memory"]
    config = compare_peers.EngineConfig(model="m", dtype="float32", max_num_seqs=7, async_scheduling=False)
    assert list(compare_peers._given(config)) == ["--dtype", "float32", "--max-num-seqs", "7", "--no-async-scheduling"]


def test_a_tree_of_processes() -> None:
    before = Busy.now()
    assert os.getpid() in tree(os.getpid()) and 10 < pss_mib(os.getpid()) < 10_000
    started = time.process_time()
    while time.process_time() - started < 0.2:
        pass
    later = Busy.now()
    assert later.own - before.own >= 0.15 and before.others(later) < os.cpu_count()  # type: ignore[operator]
