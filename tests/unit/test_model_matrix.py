"""The committed table of models is the one that the families and the last sweep give, and its words follow from the results."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from pagoda.models.registry import families
from pagoda.serving.cli.models import Row, results, rows

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "ci"))

from model_matrix import counted  # noqa: E402


def matrix(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(ROOT / "ci/model_matrix.py"), *arguments], capture_output=True, text=True, check=False)


def checkpoint(architecture: str, *runs: tuple[int, bool]) -> dict[str, Any]:
    done = [{"tp": tp, "passed": passed} for tp, passed in runs]
    return {"name": "x", "architecture": architecture, "model_type": "x", "runs": done}


def row(name: str, *checkpoints: dict[str, Any]) -> Row:
    return next(row for row in rows({"checkpoints": list(checkpoints)}) if row.architecture == name)


def test_the_table_is_fresh() -> None:
    result = matrix("--check")
    assert result.returncode == 0, result.stdout + result.stderr


def test_a_stale_table_is_noticed(tmp_path: Path) -> None:
    code = "import sys; sys.path.insert(0, sys.argv[1]); import model_matrix as m; from pathlib import Path; folder = Path(sys.argv[2])"
    script = f"{code}; a = m.main(['--check'], folder); m.main([], folder); sys.exit(10 * a + m.main(['--check'], folder))"
    result = subprocess.run([sys.executable, "-c", script, str(ROOT / "ci"), str(tmp_path)], capture_output=True, check=False)
    assert result.returncode == 10, result.stderr


def test_every_architecture_of_a_family_has_a_row() -> None:
    found = [row for row in rows(results()) if row.support == "native"]
    native = {row.architecture: row.tasks for row in found}
    known = {name: family.pools for family in families() for name in family.architectures}
    assert known.keys() <= native.keys()
    assert all((native[name] == ("generate",)) != pools for name, pools in known.items())
    # Architectures that are another use of a known one, or have one behind what sees or hears, have a row where the sweep met them.
    others = [row for row in found if row.architecture not in known]
    assert all(row.tasks != ("generate",) or "sees or hears" in row.note for row in others) and others


def test_a_difference_on_any_ranks_makes_it_red() -> None:
    assert row("LlamaForCausalLM").parity == "untested"
    green = row("LlamaForCausalLM", checkpoint("LlamaForCausalLM", (1, True), (2, True)))
    assert (green.parity, green.tp) == ("green", (1, 2))
    red = row("LlamaForCausalLM", checkpoint("LlamaForCausalLM", (1, True), (2, True)), checkpoint("LlamaForCausalLM", (2, False)))
    assert (red.parity, red.tp) == ("red", (1,))


def test_what_no_family_serves_is_unsupported() -> None:
    found = row("StrangeForCausalLM", checkpoint("StrangeForCausalLM"))
    assert (found.support, found.parity, found.tasks) == ("unsupported", "untested", ())


def test_a_model_type_counts_once_in_a_task_and_is_green_where_all_of_it_agrees() -> None:
    found = [("a", "one", True), ("b", "one", True), ("c", "two", False), ("d", "two", True), ("vlm/a", "one", True), ("e", "three", True)]
    swept = {
        "checkpoints": [
            {"name": name, "model_type": kind, "architecture": "X", "runs": [{"tp": 1, "passed": passed}]} for name, kind, passed in found
        ]
    }
    rows = {line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[3:6]] for line in counted(swept).splitlines()[2:]}
    assert rows["causal"] == ["5", "3", "2"] and rows["vlm"] == ["1", "1", "1"] and rows["any"] == ["6", "3", "2"]
    assert sum(int(row[0]) for name, row in rows.items() if name != "any") == 6


def test_the_command_prints_the_committed_data() -> None:
    command = [sys.executable, "-m", "pagoda.serving.cli.main", "models", "--json"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert json.loads(printed) == json.loads((ROOT / "docs/models.json").read_text(encoding="utf-8"))
