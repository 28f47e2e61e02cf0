"""How each engine is started: the command, what it adds to the environment, and what it calls itself."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

from pagoda import __version__
from pagoda.hal.errors import ConfigError

NAME = "m"
"""What every server is told to call its model."""

TOKENS = 1280
"""Longest sequence of any row, and some more: what a server that divides its memory by slots gets for each."""

PORT = "{port}"


@dataclass(frozen=True)
class Engine:
    """`command` holds PORT where a server's port goes; without it, the command measures itself and prints its rows.

    `lacks` names rows that it cannot measure.
    """

    name: str
    version: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    lacks: tuple[str, ...] = ()

    @property
    def serves(self) -> bool:
        return any(PORT in word for word in self.command)

    @property
    def shown(self) -> str:
        """The command, its files by their names alone."""
        return " ".join(Path(word).name if word.startswith("/") else word for word in self.command)


def pagoda(words: Sequence[str]) -> Engine:
    """`words`: the model and the engine's options."""
    address = ("--host", "127.0.0.1", "--port", PORT, "--served-model-name", NAME)
    quiet = ("--disable-access-log", "--disable-log-stats")
    command = (sys.executable, "-m", "pagoda.serving.cli.main", "serve", *words, "--device", "cpu", *address, *quiet)
    return Engine("pagoda", __version__, command)


def llama_cpp(program: str, model: Path, slots: int) -> Engine:
    """`llama-server` on a GGUF file."""
    if model.suffix != ".gguf":
        raise ConfigError(f"llama-server needs a GGUF file and the model is {model.name}: give the same weights with --gguf FILE")
    told = _said([program, "--version"]).splitlines()
    threads = str(len(os.sched_getaffinity(0)))
    shape = ("-t", threads, "-tb", threads, "-np", str(slots), "-c", str(slots * TOKENS))
    command = (_program(program), "-m", str(model), "--alias", NAME, "--host", "127.0.0.1", "--port", PORT, *shape)
    version_line = next((line for line in told if line.startswith("version")), "")
    return Engine("llama.cpp", version_line.removeprefix("version: "), command)


def vllm(python: str, model: Path) -> Engine:
    """vLLM's CPU build in an environment of its own."""
    _folder(model, "vLLM")
    libraries = _said([_program(python), "-c", _PRELOADS]).strip()
    environment = {"VLLM_CPU_OMP_THREADS_BIND": _cores(), "VLLM_CPU_KVCACHE_SPACE": "2", "LD_PRELOAD": libraries}
    shape = ("--dtype", "bfloat16", "--max-model-len", "2048", "--max-num-seqs", "64")
    address = ("--host", "127.0.0.1", "--port", PORT, "--served-model-name", NAME)
    command = (python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), *shape, *address)
    told = _said([python, "-c", _VLLM_VERSION]).strip()
    return Engine("vllm", told, command, environment)


def transformers(model: Path, rows: Sequence[str]) -> Engine:
    """`generate` in a process of its own; batches are static."""
    _folder(model, "transformers")
    command = (sys.executable, "-m", "pagoda.serving.cli.bench.peers.transformers_rows", str(model), *rows)
    return Engine("transformers", version("transformers"), command, lacks=("prefix",))


_PRELOADS = """
import glob, sys
found = glob.glob("/usr/lib/*/libtcmalloc_minimal.so.4") + glob.glob(sys.prefix + "/lib/libiomp5.so")
print(":".join(found))
"""
_VLLM_VERSION = """
from importlib.metadata import distributions
print(next(d.version for d in distributions() if d.name in ("vllm", "vllm-cpu")))
"""


def _cores() -> str:
    return ",".join(map(str, sorted(os.sched_getaffinity(0))))


def _folder(model: Path, peer: str) -> None:
    if not model.is_dir():
        raise ConfigError(f"{peer} needs a folder with safetensors and the model is {model.name}: name such a folder as the model")


def _program(path: str) -> str:
    if not Path(path).is_file():
        raise ConfigError(f"there is no {path}; give the path of the program")
    return path


def _said(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"{Path(command[0]).name} does not run: {error}") from error
    return done.stdout + done.stderr
