"""Where no C++ compiler is: the package builds and serves, and one sentence says what is missing and how to get it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from frontend_samples import byte_level
from tiny_checkpoints import make

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("__init__.py", "py.typed", "pyproject.toml", "setup.py", "README.md", "LICENSE")
ROOMS = ("hal", "ops", "backends", "quant", "models", "serving", "docs/parity")
BUILT = "native kernels: not built, there is no C++ compiler (install g++ or clang++); the portable ones serve"
RUNS = (
    "the native library is not built (install g++ or clang++, then: python -m pagoda.ops.native.build):"
    " the portable kernels serve, many times slower"
)


def _run(*words: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Where nothing but Python is found."""
    (nothing := cwd / "nothing").mkdir(exist_ok=True)
    known = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "CC", "CXX")}
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=cwd, env=known | {"PATH": str(nothing)} | environment, capture_output=True, text=True, check=False)


def _wheel(folder: Path) -> Path:
    tree = folder / "tree"
    for room in ROOMS:
        shutil.copytree(ROOT / room, tree / room, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for name in SOURCES:
        shutil.copy(ROOT / name, tree / name)
    built = _run("setup.py", "bdist_wheel", "--dist-dir", str(folder), cwd=tree)
    assert built.returncode == 0, built.stderr
    assert built.stdout.count(BUILT) == 1
    return next(folder.glob("*.whl"))


@pytest.mark.heavy
def test_a_wheel_from_a_machine_without_a_compiler_serves(tmp_path: Path) -> None:
    wheel = _wheel(tmp_path)
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert not [name for name in archive.namelist() if name.endswith(".so")]
        archive.extractall(tmp_path / "site")
    tokenizer = byte_level()
    make(tmp_path / "model", "Llama", vocab_size=tokenizer.get_vocab_size(), bos_token_id=0, eos_token_id=1, pad_token_id=2)
    tokenizer.save(str(tmp_path / "model/tokenizer.json"))
    words = ("generate", str(tmp_path / "model"), "Hello", "--device", "cpu", "--max-tokens", "4", "--kv-cache-memory-bytes", "8M")
    done = _run(
        "-m", "pagoda.serving.cli.main", *words, cwd=tmp_path, PYTHONPATH=str(tmp_path / "site"), XDG_CACHE_HOME=str(tmp_path / "cache")
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(RUNS) == 1, done.stderr
    assert done.stdout.strip()
