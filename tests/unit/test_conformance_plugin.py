"""The pytest plugin runs conformance checks as tests, in a run of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_checks_become_tests_only_when_asked(tmp_path: Path) -> None:
    (tmp_path / "test_own.py").write_text("def test_own(): pass\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    plain = subprocess.run(command, capture_output=True, text=True, check=False)
    assert plain.returncode == 0 and "1 passed" in plain.stdout, plain.stdout
    asked = [*command, "--pagoda-device", "cpu", "--pagoda-level", "2"]
    result = subprocess.run(asked, capture_output=True, text=True, check=False)
    assert result.returncode == 0 and "10 passed, 1 skipped" in result.stdout, result.stdout + result.stderr
