"""The worked example of CONTRIBUTING.md: what it quotes is in the tree, its commands run, and a file in models/families is enough."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from pagoda.models import families, registry

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
SECTION = TEXT[TEXT.index("## A decoder in one file") : TEXT.index("## What a change brings")]
FAMILY = """
from pagoda.models.families.llama import spec
from pagoda.models.families.common import llama_rules
from pagoda.models.family import Family

NEW = Family("new", ("BrandNewForCausalLM",), ("brand_new",), spec, lambda made: llama_rules(made.head.tied))
"""


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", SECTION, re.DOTALL)


def test_what_is_quoted_is_there() -> None:
    family, row = blocks("python")
    assert family in (ROOT / "models/families/xglm.py").read_text()
    assert row in (ROOT / "tests/unit/test_families.py").read_text()


@pytest.mark.heavy
def test_its_commands_run() -> None:
    (commands,) = blocks("bash")
    pagoda = f"{sys.executable} -m pagoda.serving.cli.main"
    for line in commands.splitlines():
        command = re.sub(r"^python\b", sys.executable, re.sub(r"^pagoda\b", pagoda, line))
        done = subprocess.run(command, cwd=ROOT, shell=True, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, f"{line}: {done.stdout[-2000:]} {done.stderr[-2000:]}"


def test_a_file_in_the_folder_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "brand_new.py").write_text(FAMILY)
    monkeypatch.setattr(families, "__path__", [*families.__path__, str(tmp_path)])
    found = [family for family in registry._built_in() if family.name == "new"]
    assert [family.architectures for family in found] == [("BrandNewForCausalLM",)]
    sys.modules.pop("pagoda.models.families.brand_new")
