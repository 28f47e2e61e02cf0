"""A backend outside the tree: built, installed with pip, found, and held to the contract, with no patch to Pagoda."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from pagoda.hal.discovery import find
from pagoda.hal.kv import CacheGroup, CacheKind, LayerCache
from pagoda.hal.table import KernelPolicy
from pagoda.ops.norm import NormFacts
from pagoda.ops.table import kernel_table
from pagoda.serving.cli.diff import told
from pagoda.serving.cli.side_by_side import Comparison, compare_sides, open_side
from pagoda.serving.conformance.tiny_models import TINY

SOURCE = Path(__file__).parent / "paperchip"


def test_it_knows_hal_and_ops_alone() -> None:
    allowed = {"pagoda.hal", "pagoda.ops"}
    for path in SOURCE.rglob("*.py"):
        names = [node.module or "" for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
        rooms = {".".join(name.split(".")[:2]) for name in names if name.startswith("pagoda")}
        assert rooms <= allowed, f"{path.name} reaches into {sorted(rooms - allowed)}"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that pip installed the plugin into."""
    work = tmp_path_factory.mktemp("plugin")
    shutil.copytree(SOURCE, work / "source")
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "--disable-pip-version-check", "--target", str(work / "site"), str(work / "source")], check=True)
    return work / "site"


def pagoda(installed: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(installed), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-c", "import sys; from pagoda.serving.cli.main import main; sys.exit(main())", *arguments]
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False)


@pytest.mark.heavy
def test_it_is_listed_with_its_kernels(installed: Path) -> None:
    result = pagoda(installed, "devices", "--json", "--kernels")
    assert result.returncode == 0, result.stderr
    records = {record["name"]: record for record in json.loads(result.stdout)}
    chip = records["paperchip"]
    assert chip["available"] and [device["index"] for device in chip["devices"]] == [0]
    offered = {(kernel["op"], kernel["name"]) for kernel in chip["devices"][0]["kernels"]}
    assert {("rms_norm", "paper"), ("gated_activation", "paper"), ("rms_norm", "reference")} <= offered
    assert ("rms_norm", "paper") in {(kernel["op"], kernel["name"]) for kernel in records["cpu"]["devices"][0]["kernels"]}


@pytest.mark.heavy
def test_it_conforms(installed: Path, tmp_path: Path) -> None:
    result = pagoda(installed, "conformance", "--device", "paperchip", "--json", str(tmp_path / "report.json"))
    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["levels"] == dict.fromkeys(("device", "kernels", "graphs", "collectives", "models", "engine"), True)
    judged = {one["name"]: one["outcome"] for one in report["results"] if one["level"] == 1}
    assert judged["rms_norm=paper"] == judged["gated_activation=paper"] == "passed"


PROMPTS = [[(7 * length + 31 * i * i) % 250 for i in range(length)] for length in (1, 7, 33)]
WRONG = {
    "gemm=ragged": (0, "the prompts' step", "layer 0"),
    "gated_activation=rounded": (0, "the prompts' step", "layer 0"),
    "paged_attention=decode": (1, "decode step 1", "layer 0"),
    "write_kv=swapped": (0, "the prompts' step", "layer 0"),
}
"""A kernel that is wrong on purpose → step and layer where it first shows."""


def compared(kernels: dict[str, str], config: dict[str, Any], dtype: str = "float32") -> Comparison:
    sides = [open_side(find("reference"), 0, KernelPolicy(chosen), config, dtype)[0] for chosen in (kernels, {})]
    return compare_sides((sides[0], sides[1]), PROMPTS, 2)


@pytest.mark.parametrize("kernel", sorted(WRONG))
def test_a_diff_names_the_kernel_that_is_wrong(kernel: str, monkeypatch: pytest.MonkeyPatch, installed: Path) -> None:
    monkeypatch.syspath_prepend(str(installed))
    step, told_step, told_part = WRONG[kernel]
    op, _, name = kernel.partition("=")
    found = compared({op: name}, TINY["grouped queries, rotation, gated feed-forward"])
    culprit = found.culprit
    assert culprit is not None and found.parted is not None and found.parted.step == step
    assert (culprit.side, culprit.verdict.kernel.op, culprit.verdict.kernel.name) == (0, op, name)
    text = "\n".join(told(found, (f"reference ({kernel})", "reference")))
    for part in (told_step, told_part, kernel, "paperchip.wrong:", "float32[", f"--device reference --level 1 --check {kernel}"):
        assert part in text, text


def test_two_vendors_in_one_process(monkeypatch: pytest.MonkeyPatch, installed: Path) -> None:
    monkeypatch.syspath_prepend(str(installed))
    backend, cpu = find("paperchip"), find("cpu")
    assert kernel_table(backend, backend.describe()).choose("rms_norm", NormFacts("float32", 64, 1e-5)).chosen.name == "paper"
    cache = LayerCache(CacheKind.FULL, 2, 16, 8, "bfloat16")
    group = CacheGroup(CacheKind.FULL, (0, 1), (cache, cache), 32, 0)
    here, there = cpu.open().kv_layout(group), backend.open().kv_layout(group)
    assert here.page_shape != there.page_shape, "the two lay pages differently"
    (pool, views), (paper, sheets) = here.allocate(4), there.allocate(6)
    for view in views:
        view.k.copy_(torch.randn(view.k.shape))
        view.v.copy_(torch.randn(view.v.shape))
    there.load(paper, torch.tensor([5, 2]), here.export(pool, torch.tensor([1, 3])))
    for view, sheet in zip(views, sheets, strict=True):
        assert torch.equal(view.k[[1, 3]], sheet.k[[5, 2]]) and torch.equal(view.v[[1, 3]], sheet.v[[5, 2]])
