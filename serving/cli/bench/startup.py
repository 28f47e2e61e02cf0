"""`pagoda bench startup`: from the start of the process until the server is ready, and until its first token."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Annotated

from pagoda import __version__
from pagoda.hal.errors import PagodaError
from pagoda.serving.cli.bench.report import summary, table, write_json
from pagoda.serving.cli.flags import Parser, build
from pagoda.serving.cli.remote import Remote, connect
from pagoda.serving.cli.words import with_model
from pagoda.serving.engine.config import EngineConfig, Flag

STOP_SECONDS = 30


@dataclass(frozen=True)
class StartupOptions:
    """How often, and where the result goes."""

    num_iters: Annotated[int, Flag("Starts to measure.", section="Benchmark")] = 3
    json: Annotated[str | None, Flag("Write the result to a file, or to standard output for -.", ("--output-json",), metavar="FILE")] = None


def run(argv: Sequence[str]) -> int:
    parser = Parser("bench startup", "Time a fresh `pagoda serve`; options of the engine are passed on.", "[MODEL] [options]", words=1)
    parser.add_config(StartupOptions)
    parser.add_config(EngineConfig)
    values = with_model(parser.values(argv))
    options, config = build(StartupOptions, values), build(EngineConfig, values)
    mine = {"--num-iters", "--json", "--output-json"}
    passed = _without(argv, mine)
    runs = [asyncio.run(start_once(passed)) for _ in range(options.num_iters)]
    spreads = {name: summary([run[name] for run in runs]) for name in runs[0]}
    result = {"kind": "startup", "pagoda": __version__, "model": config.model, "runs": runs, **spreads}
    if options.json != "-":
        print(table(f"{config.model}: {len(runs)} starts, seconds", {}, spreads))
    write_json(options.json, result)
    return 0


async def start_once(argv: Sequence[str]) -> dict[str, float]:
    """Seconds from process start to ready, by its parts, and to the first token of a first request."""
    started = time.perf_counter()
    async with _server(argv) as remote:
        ready = time.perf_counter() - started
        model = (await remote.models())[0]["id"]
        async with aclosing(remote.stream("/v1/completions", {"model": model, "prompt": "Hello", "max_tokens": 1})) as events:
            async for _ in events:
                break
        first_token = time.perf_counter() - started
        parts = (await remote.engine_facts())["load_seconds"]
        rest = {"imports, tokenizer and processes": ready - sum(parts.values()), **parts}
        return {**{f"of which {name}": seconds for name, seconds in rest.items()}, "ready_s": ready, "first_token_s": first_token}


@asynccontextmanager
async def _server(argv: Sequence[str]) -> AsyncIterator[Remote]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "pagoda.serving.cli.main", "serve", *argv, "--host", "127.0.0.1", "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        async with connect(f"http://127.0.0.1:{port}") as remote:
            await _until_ready(process, remote)
            yield remote
    finally:
        process.terminate()
        try:
            process.communicate(timeout=STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


async def _until_ready(process: subprocess.Popen[str], remote: Remote) -> None:
    while True:
        if process.poll() is not None:
            assert process.stderr is not None
            raise PagodaError(f"the server ended with {process.returncode}: {process.stderr.read().strip() or 'it said nothing'}")
        try:
            await remote.models()
            return
        except PagodaError:
            await asyncio.sleep(0.02)


def _without(argv: Sequence[str], names: set[str]) -> list[str]:
    kept, skip = [], False
    for word in argv:
        name = word.partition("=")[0].replace("_", "-") if word.startswith("--") else word
        if skip or name in names:
            skip = not skip and name in names and "=" not in word
        else:
            kept.append(word)
    return kept
