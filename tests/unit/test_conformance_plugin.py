"""The pytest plugin runs conformance checks as tests, in a run of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.heavy
def test_checks_become_tests_only_when_asked(tmp_path: Path) -> None:
    (tmp_path / "test_own.py").write_text("def test_own(): pass\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    plain = subprocess.run(command, capture_output=True, text=True, check=False)
    assert plain.returncode == 0 and "1 passed" in plain.stdout, plain.stdout
    asked = [*command, "--pagoda-device", "reference", "--pagoda-level", "2", "-vv"]
    result = subprocess.run(asked, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    tests = [line for line in result.stdout.splitlines() if "graphs: " in line]
    unclaimed = [line for line in tests if "captured or traced" in line or "in pieces" in line]
    assert len(unclaimed) == 2 and all("SKIPPED" in line for line in unclaimed), "what needs graphs is not claimed"
    assert len(tests) > 8 and sum("PASSED" in line for line in tests) == len(tests) - 2, "all others pass"
