"""Every backend has a row in ci/matrix.yaml and a page in docs/vendor that says no more than was seen."""

from __future__ import annotations

import tomllib
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from pagoda.hal.discovery import INSTRUMENTS

ROOT = Path(__file__).resolve().parents[2]
STRANGERS = {"spyre", "rebellions", "metax", "neuron"}


@pytest.fixture
def matrix(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "ci"))
    import matrix

    return matrix


def built_in() -> set[str]:
    return set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["pagoda.backends"]) - INSTRUMENTS


def test_every_backend_and_both_plugins_have_a_row(matrix: ModuleType) -> None:
    rows = matrix.rows()
    assert set(rows) == built_in() | {"fake", "paperchip"} | STRANGERS
    for name, row in rows.items():
        more = {"packages", "hook"} if name in STRANGERS else {"simulated"} & set(row)
        assert set(row) == {"runner", "image", "install", "devices", "levels", "shown"} | more
        assert row["shown"] in ("hardware", "simulation", "documentation") and set(row["levels"]) <= set(range(6))
        assert bool(row["levels"]) == (name not in STRANGERS)


def test_a_plugin_s_devices_are_those_that_it_registers(matrix: ModuleType) -> None:
    for name, folder in (("fake", "docs/vendor/example"), ("paperchip", "tests/plugin/paperchip")):
        points = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]["entry-points"]["pagoda.backends"]
        assert sorted(points) == sorted(matrix.rows()[name]["devices"])
        assert any(folder in command for command in matrix.rows()[name]["install"])


def test_the_commands_of_a_row(matrix: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert matrix.main(["paperchip"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "make install" and lines[-1].startswith("pagoda conformance --device paperchip --level 0 --level 1")
    assert matrix.main(["abacus"]) == 2


def test_the_workflow_has_a_job_for_each_device(matrix: ModuleType) -> None:
    text = matrix.WORKFLOW.read_text()
    assert text == matrix.workflow()
    jobs = yaml.safe_load(text)["jobs"]
    ours = {name: row for name, row in matrix.rows().items() if name not in STRANGERS}
    devices = {device for row in ours.values() for device in row["devices"]}
    simulated = {f"{name}-simulated": row["simulated"] for name, row in ours.items() if "simulated" in row}
    assert {*built_in(), "fake", "fake-graph", "fake-static", "paperchip"} == devices and "tpu-simulated" in simulated
    assert set(jobs) == {*devices, *simulated}
    for name, job in jobs.items():
        run = job["steps"][1]["run"].splitlines()
        wanted = simulated.get(name, [f"pagoda conformance --device {name} --level 0 "])
        assert all(sum(line.startswith(one) for line in run) == 1 for one in wanted), name
        assert sum("pagoda conformance" in line for line in run) <= 1, "a device that fails must not keep another from its turn"
    kept = [job["steps"][2]["with"]["name"] for job in jobs.values()]
    assert len(set(kept)) == len(kept), "reports of two jobs under one name"


def test_pages_claim_no_more_than_the_matrix(matrix: ModuleType) -> None:
    for name in built_in():
        page = (ROOT / f"docs/vendor/{name}.md").read_text()
        columns = "| what | on hardware | by simulation | by documentation only |"
        assert columns in page, name
        cells = [line.split("|")[2].strip() for line in page.split(columns)[1].splitlines() if line.startswith("|")][1:]
        assert cells and (matrix.rows()[name]["shown"] == "hardware") == any(cell not in ("", "–") for cell in cells), name
