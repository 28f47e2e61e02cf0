"""What the pages of docs/vendor tell to type: plans run, absent devices say so in a sentence, make's targets and files are there."""

from __future__ import annotations

import re
import shlex
from itertools import dropwhile
from pathlib import Path

import pytest
from pagoda.hal.discovery import find
from pagoda.serving.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
MADE = ("README", "cuda-conformance", "tpu-conformance", "cpu-verified")
PAGES = sorted(path for path in (ROOT / "docs/vendor").glob("*.md") if path.stem not in MADE)


def lines(page: Path) -> list[list[str]]:
    """Each command's words, without its comment and the variables before it."""
    blocks = re.findall(r"```(?:console|text)\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    found = [shlex.split(re.split(r"\s{3,}|\s#", line)[0]) for block in blocks for line in block.splitlines() if line.strip()]
    return [list(dropwhile(lambda word: re.fullmatch(r"[A-Z_]+=.*", word), words)) for words in found]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_commands_of_a_page(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = lines(page)
    assert found
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for words in found:
        if words[:2] == ["pagoda", "plan"]:
            assert main(words[1:]) == 0, words
            assert words[words.index("--device") + 1].partition(":")[2] in capsys.readouterr().out
        elif words[:2] == ["pagoda", "conformance"]:
            name = words[words.index("--device") + 1]
            if not find(name).probe().available:
                assert main(words[1:]) != 0
                assert capsys.readouterr().err.startswith(f"pagoda: device {name!r} is not available: ")
        elif words[0] == "make":
            assert words[1] in targets, words
        else:
            assert any((ROOT / word).exists() for word in words if "/" in word), words
