"""Every command that docs/vendor/README.md tells a vendor to run, run: with the example accelerator for the vendor's own."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GUIDE = (ROOT / "docs/vendor/README.md").read_text(encoding="utf-8")
PROGRAMS = ("pagoda", "pip", "pytest", "python")
NAMES = {
    "mychip:MODEL": "fake-graph:fake-1",
    "mychip": "fake-graph",
    "MODEL": "smollm2-135m-instruct",
    "gemm=mine": "gemm=reference",
}
"""What the guide leaves to the reader → what is here."""

ALL_LEVELS = re.compile(r"^(pagoda conformance|pytest)(?!.*-level)")
"""Commands that hold a device to all levels: here to level 0, since test_fake_device.py has all of them, level by level."""


SMALL = ("--max-num-seqs", "4", "--max-num-batched-tokens", "128", "--max-model-len", "256")
"""The example accelerator has 1 GiB, for a model whose weights it takes in float32."""


def commands() -> list[str]:
    spans = [span for span in re.findall(r"`([^`\n]+)`", GUIDE) if span.partition(" ")[0] in PROGRAMS and " " in span]
    blocks = [line.strip() for block in re.findall(r"```console\n(.*?)```", GUIDE, re.DOTALL) for line in block.splitlines()]
    return list(dict.fromkeys([*spans, *filter(None, blocks)]))


def words_of(command: str, folder: Path) -> list[str]:
    for placeholder, name in NAMES.items():
        command = re.sub(rf"(?<![\w-]){re.escape(placeholder)}\b", name, command)
    program, *rest = shlex.split(command)
    if ALL_LEVELS.match(command):
        rest += ["--pagoda-level", "0"] if program == "pytest" else ["--level", "0"]
    if "--level 1" in command and "--check" not in command:
        rest += ["--check", "rms_norm=reference"]  # test_fake_device.py has the others
    if rest[0] in ("plan", "generate"):
        rest += SMALL
    if program == "pip":
        rest = [*rest[:-1], "--no-deps", "--no-index", "--target", str(folder / "site"), str(ROOT / rest[-1])]
    if program == "pytest":
        rest += ["-p", "no:cacheprovider", str(folder)]
    return [sys.executable, "-m", {"pagoda": "pagoda.serving.cli.main"}.get(program, program), *rest]


def test_the_guide_names_its_commands() -> None:
    found = commands()
    assert len(found) >= 10 and {command.partition(" ")[0] for command in found} == {"pagoda", "pip", "pytest"}
    assert {"devices", "plan", "conformance", "generate", "diff"} <= {command.split()[1] for command in found}


@pytest.mark.heavy
@pytest.mark.parametrize("command", commands())
def test_a_command_of_the_guide(command: str, environment: dict[str, str], tmp_path: Path) -> None:
    done = subprocess.run(
        words_of(command, tmp_path), cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    if command == "pagoda devices":
        assert "fake-graph" in done.stdout
    if "--junit" in command:
        assert {"report.xml", "report.md"} <= {path.name for path in tmp_path.iterdir()}
    if command.startswith("pip"):
        assert (tmp_path / "site/fakechip/libfake.so").exists()
