"""What the guides of SDK and command line say to run, run."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

GUIDES = Path(__file__).parents[2] / "docs" / "guide"
PAGES = [(GUIDES / page).read_text() for page in ("sdk.md", "embeddings.md")]
PROGRAMS = [program for page in PAGES for program in re.findall(r"```python\n(.*?)```", page, re.DOTALL)]
LINES = re.findall(r"^\$ (.*)$", (GUIDES / "cli.md").read_text(), re.MULTILINE)
NEEDS_MORE = ("pagoda serve", "pagoda chat", "./my-checkpoint", "--url", "https://", "before.json")
"""Lines that go on until they are stopped, or speak of files and servers of the reader; their own tests run them."""

SIMPLE = [line for line in LINES if not any(more in line for more in NEEDS_MORE) or line.endswith("--help") or "| pagoda chat" in line]
pytestmark = pytest.mark.heavy


@pytest.mark.parametrize("program", PROGRAMS, ids=[f"program-{i}" for i in range(len(PROGRAMS))])
def test_a_program(program: str) -> None:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200, check=False)
    assert (done.returncode == 0 and done.stdout.strip()) or "LLM(device" in program, done.stderr


@pytest.mark.parametrize("line", SIMPLE)
def test_a_line(line: str) -> None:
    command = line.replace("pagoda ", f"{shlex.quote(sys.executable)} -m pagoda.serving.cli.main ", 1)
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0 and done.stdout.strip(), done.stderr


def test_most_lines_are_run_here() -> None:
    assert len(PROGRAMS) >= 5 and len(SIMPLE) >= 10
