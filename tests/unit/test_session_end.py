"""A test run ends: threads that tests left running are named, and the process exits with an error instead of waiting for them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

LEAVES_A_THREAD = """
import threading

def test_that_passes():
    threading.Thread(target=threading.Event().wait, name="left behind", daemon={daemon}).start()
"""
LEAVES_A_BUSY_POOL = """
import threading
from concurrent.futures import ThreadPoolExecutor

def test_that_passes():
    ThreadPoolExecutor(1, "pool").submit(threading.Event().wait)
"""
LEAVES_AN_IDLE_POOL = """
from concurrent.futures import ThreadPoolExecutor

POOL = ThreadPoolExecutor(1)

def test_that_passes():
    POOL.submit(print).result()
"""


def run(folder: Path, source: str, patience: float) -> subprocess.CompletedProcess[str]:
    """pytest with this folder's conftest.py, and nothing else of this project."""
    (folder / "test_left.py").write_text(source)
    path = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, sys.path)])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "conftest", "-o", f"exit_patience={patience}", "."]
    environment = {**os.environ, "PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200, check=False)


@pytest.mark.parametrize(
    ("source", "name"), [(LEAVES_A_THREAD.format(daemon=False), "left behind"), (LEAVES_A_BUSY_POOL, "pool_0")], ids=["thread", "pool"]
)
def test_a_thread_that_was_left_is_named_and_the_run_fails(tmp_path: Path, source: str, name: str) -> None:
    done = run(tmp_path, source, 0.5)
    assert done.returncode == 1 and "1 passed" in done.stdout
    assert "still waits after 0.5 s" in done.stderr and f"thread {name!r}" in done.stderr and "in wait" in done.stderr


@pytest.mark.parametrize("source", [LEAVES_A_THREAD.format(daemon=True), LEAVES_AN_IDLE_POOL], ids=["daemon", "idle pool"])
def test_what_ends_with_the_interpreter_is_no_failure(tmp_path: Path, source: str) -> None:
    done = run(tmp_path, source, 190)
    assert (done.returncode, done.stderr) == (0, "") and "1 passed" in done.stdout
