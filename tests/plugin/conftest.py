"""The example accelerator of docs/vendor, built as a wheel and installed by pip into a folder of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "docs/vendor/example"


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables of a process that finds the installed plugin."""
    work = tmp_path_factory.mktemp("example")
    shutil.copytree(EXAMPLE, work / "source", ignore=shutil.ignore_patterns("*.so", "build", "*.egg-info"))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    offline = ["--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "wheel", *offline, "--wheel-dir", str(work / "wheels"), str(work / "source")], check=True)
    (wheel,) = (work / "wheels").glob("*.whl")
    subprocess.run([*pip, "install", *offline, "--target", str(work / "site"), str(wheel)], check=True)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(work / "site"), *filter(None, [os.environ.get("PYTHONPATH")])])}
