"""`pagoda bench compare`: numbers of two results by their names, ratios, a picture; and the benchmarks of an engine alone."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from pagoda.hal.errors import ConfigError
from pagoda.serving.cli.bench.command import run
from tiny_checkpoints import make

BEFORE = {"kind": "sweep", "model": "m", "options": {"num_iters": 3}, "values": {"batch 1": [4.0, 2.0, 3.0]}, "seconds": 8, "gone": 1}
AFTER = {"kind": "sweep", "model": "m", "options": {"num_iters": 5}, "values": {"batch 1": [6.0]}, "seconds": 4, "fresh": 1}


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    for name, result in (("before", BEFORE), ("after", AFTER)):
        (tmp_path / f"{name}.json").write_text(json.dumps(result))
    return [str(tmp_path / f"{name}.json") for name in ("before", "after")]


def test_numbers_are_paired_by_name(files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["compare", *files, "--plot", str(tmp_path / "plot.svg"), "--json", str(tmp_path / "out.json")]) == 0
    rows = {row["name"]: (row["a"], row["b"], row["ratio"]) for row in json.loads((tmp_path / "out.json").read_text())["rows"]}
    assert rows == {"values batch 1 (median)": (3.0, 6.0, 2.0), "seconds": (8.0, 4.0, 0.5)}
    assert "2.000   ██" in capsys.readouterr().out
    texts = [node.text for node in ElementTree.parse(tmp_path / "plot.svg").iter() if node.tag.endswith("text")]
    assert {"seconds", "0.500", "2.000"} <= set(texts)


@pytest.mark.parametrize(
    ("names", "said"), [((0,), "name two"), ((0, 1, "--only", "nothing"), "no number in common"), ((0, "absent.json"), "cannot be read")]
)
def test_what_cannot_be_compared_is_said(files: list[str], names: tuple[int | str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        run(["compare", *(files[name] if isinstance(name, int) else name for name in names)])


@pytest.mark.parametrize(
    ("kind", "given", "names"),
    [
        ("prefill", ["--input-lens", "8", "20"], ["8 tokens, tok/s", "20 tokens, tok/s"]),
        ("prefix", ["--prefix-len", "40", "--suffix-len", "3"], ["not cached, ms", "cached, ms"]),
        ("sweep", ["--batch-sizes", "1", "3", "--output-len", "4"], ["batch 1, ms a step", "batch 3, ms a step"]),
    ],
)
def test_an_engine_alone_is_measured(tmp_path: Path, kind: str, given: list[str], names: list[str]) -> None:
    make(tmp_path, "Qwen3", head_dim=16)
    engine = ["--device", "cpu", "--skip-tokenizer-init", "--num-gpu-blocks-override", "64", "--block-size", "16"]
    out = tmp_path / "out.json"
    assert run([kind, str(tmp_path), *engine, *given, "--num-iters", "2", "--vocab", "130", "--json", str(out)]) == 0
    values = json.loads(out.read_text())["values"]
    assert list(values) == names and all(len(numbers) == 2 and min(numbers) > 0 for numbers in values.values())
