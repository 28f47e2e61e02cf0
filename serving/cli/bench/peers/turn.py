"""One engine's turn: start, first token, every row, peak memory, end. The machine belongs to one engine at a time."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import httpx
from pagoda.hal.errors import PagodaError
from pagoda.serving.cli.bench.peers.engines import NAME, PORT, Engine
from pagoda.serving.cli.bench.peers.generators import Generator
from pagoda.serving.cli.bench.peers.rows import Row
from pagoda.serving.cli.bench.process_tree import Busy, PeakMemory

START_SECONDS = 300
STOP_SECONDS = 20
END_SECONDS = 20
PROMPT = [1, 2, 3]
TERMINATED = 128 + signal.SIGTERM


@dataclass(frozen=True)
class Turn:
    """Values by row, and how many cores other processes used meanwhile."""

    values: dict[str, float]
    others: float


def take_turn(engine: Engine, rows: tuple[Row, ...], generate: Generator, vocab: int) -> Turn:
    """Raises `PagodaError` with the end of the engine's log when it does not start or fails a request."""
    before = Busy.now()
    with tempfile.TemporaryFile("w+") as log, _running(engine, log) as (process, port):
        memory = PeakMemory(process.pid)
        memory.start()
        try:
            values = _serve(process, port, rows, generate, vocab) if engine.serves else _printed(process)
        except (PagodaError, httpx.HTTPError) as error:
            raise PagodaError(f"{engine.name}: {error}\n{_tail(log)}") from error
        values["memory"] = memory.end()
        others = before.others(Busy.now())  # while it lives: the time of a child that nobody waited for would count as others'
    return Turn({row.name: values[row.name] for row in rows if row.name in values}, others)


def _serve(process: subprocess.Popen[str], port: int, rows: tuple[Row, ...], generate: Generator, vocab: int) -> dict[str, float]:
    url = f"http://127.0.0.1:{port}"
    values = {"start": _first_token(process, url)}
    for row in rows:
        if row.load is not None:
            warm = row.load._replace(answer=min(row.load.answer, 8), requests=row.load.together, shared=0)
            generate(url, NAME, warm, vocab)
            values[row.name] = row.value(generate(url, NAME, row.load, vocab))
    return values


def _first_token(process: subprocess.Popen[str], url: str) -> float:
    """Seconds from now until a first token came."""
    began = time.perf_counter()
    body = {"model": NAME, "prompt": PROMPT, "max_tokens": 1, "temperature": 0}
    with httpx.Client(timeout=START_SECONDS) as client:
        while time.perf_counter() - began < START_SECONDS:
            if process.poll() is not None:
                raise PagodaError(f"the server ended with {process.returncode}")
            try:
                reply = client.post(f"{url}/v1/completions", json=body)
            except httpx.TransportError:
                time.sleep(0.02)  # it does not listen yet
                continue
            if reply.is_success:
                return time.perf_counter() - began
            if reply.status_code not in (429, 502, 503):
                raise PagodaError(f"the server refused with {reply.status_code}: {reply.text[:300]}")
            time.sleep(0.02)
    raise PagodaError(f"no token after {START_SECONDS} s")


def _printed(process: subprocess.Popen[str]) -> dict[str, float]:
    """Rows of an engine that measures itself: a line with its first token, then one JSON object."""
    began = time.perf_counter()
    assert process.stdout is not None
    process.stdout.readline()
    start = time.perf_counter() - began
    with process.stdout:
        output = process.stdout.read()
    if process.wait(END_SECONDS):
        raise PagodaError(f"it ended with {process.returncode}")
    return {"start": start, **json.loads(output)}


@contextmanager
def _running(engine: Engine, log: IO[str]) -> Iterator[tuple[subprocess.Popen[str], int]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [word.replace(PORT, str(port)) for word in engine.command]
    output: IO[str] | int = log if engine.serves else subprocess.PIPE
    environment = {**os.environ, **engine.environment}
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))  # our end must be the engine's too
    process = subprocess.Popen(command, stdout=output, stderr=log, text=True, env=environment, start_new_session=True)
    try:
        yield process, port
    finally:
        signal.signal(signal.SIGTERM, before)
        _stop(process)


def _stop(process: subprocess.Popen[str]) -> None:
    """End its whole session, which we made."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            os.killpg(process.pid, number)
        try:
            process.wait(STOP_SECONDS)
            return
        except subprocess.TimeoutExpired:
            continue


def _tail(log: IO[str]) -> str:
    log.flush()
    log.seek(0)
    return "\n".join(log.read().splitlines()[-8:])


def warm_page_cache(path: Path) -> None:
    """Read the model's files once, so that no engine's first start pays for the disk."""
    for file in [path] if path.is_file() else sorted(path.glob("*.safetensors")):
        with file.open("rb", buffering=0) as stream:
            while stream.read(1 << 24):
                pass
