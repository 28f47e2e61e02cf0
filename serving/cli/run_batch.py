"""`pagoda run-batch`: a file of requests in OpenAI's batch format in, a file of replies out; local files or http(s) addresses."""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated

import httpx
from pagoda.hal.errors import ConfigError, PagodaError
from pagoda.serving.api.app import build_app
from pagoda.serving.api.batch import Outcome, run_batch
from pagoda.serving.api.config import ServerConfig
from pagoda.serving.api.launch import card_of, open_service
from pagoda.serving.api.logs import set_up_logging
from pagoda.serving.api.server import run_loop
from pagoda.serving.api.service import Service
from pagoda.serving.cli.flags import Parser, build, options_of
from pagoda.serving.cli.words import with_model
from pagoda.serving.engine.child import Child, engine_child
from pagoda.serving.engine.config import EngineConfig, Flag
from pagoda.serving.engine.progress import TerminalBar, terminal_bar

_OF_SERVE = (
    "served_model_name", "max_prompts", "generation_config", "override_generation_config", "chat_template", "chat_template_content_format",
    "default_chat_template_kwargs", "tool_call_parser", "reasoning_parser", "response_role", "trust_request_chat_template",
    "return_tokens_as_token_ids", "otlp_traces_endpoint", "log_level",
)  # fmt: skip


@dataclass(frozen=True)
class BatchOptions:
    """Of `pagoda run-batch`."""

    input_file: Annotated[str, Flag("File or http(s) address to read requests from, one a line.", ("-i",), "FILE", "Files")] = ""
    output_file: Annotated[
        str, Flag("File to write replies to, one a line and in the same order; or an http(s) address, for one PUT.", ("-o",), "FILE")
    ] = ""

    def __post_init__(self) -> None:
        if not self.input_file or not self.output_file:
            raise ConfigError("a batch needs --input-file (-i) and --output-file (-o)")


def run(argv: Sequence[str]) -> int:
    values = with_model(options().values(argv))
    files, engine_config = build(BatchOptions, values), build(EngineConfig, values)
    server_config = build(ServerConfig, values | {"max_stored_responses": 0})
    if not _is_url(files.input_file) and not Path(files.input_file).is_file():
        raise ConfigError(f"--input-file {files.input_file}: there is no such file")
    set_up_logging(server_config)
    child = engine_child()
    try:
        return run_loop(lambda: _run(files, engine_config, server_config, child))
    finally:
        child.kill()


def options() -> Parser:
    parser = Parser("run-batch", "Answer a file of requests in OpenAI's batch format.", "[MODEL] -i FILE -o FILE [options]", words=1)
    parser.add_config(BatchOptions)
    parser.add_config(EngineConfig)
    for option in options_of(ServerConfig):
        if option.name in _OF_SERVE:
            parser.add_option(option, "Replies")
    parser.add_config_file()
    return parser


async def _run(files: BatchOptions, engine_config: EngineConfig, server_config: ServerConfig, child: Child) -> int:
    async with _read(files.input_file) as source, _written(files.output_file) as target:
        service = await open_service(engine_config, server_config, card_of(engine_config, server_config), child)
        try:
            total = sum(1 for line in source if line.strip())
            source.seek(0)
            return await _answer(service, source, target, total)
        finally:
            await service.client.close()
            service.close()


async def _answer(service: Service, source: IO[str], target: IO[str], total: int) -> int:
    bar, began = terminal_bar(sys.stderr, "requests", ("MofNCompleteColumn", "TimeRemainingColumn")), time.monotonic()

    def told(outcome: Outcome) -> None:
        target.flush()
        _show(bar, outcome, total)

    outcome = await run_batch(build_app(service), source, target.write, told)
    if bar is not None:
        bar.end()
    print(f"{outcome.done} requests in {time.monotonic() - began:.1f} s, {outcome.failed} of them failed", file=sys.stderr)
    return 1 if service.dead is not None else 0


def _show(bar: TerminalBar | None, outcome: Outcome, total: int) -> None:
    if bar is not None:
        bar.update(outcome.done, total, f"{outcome.failed} failed" if outcome.failed else "")


def _is_url(where: str) -> bool:
    return where.startswith(("http://", "https://"))


@asynccontextmanager
async def _read(where: str) -> AsyncIterator[IO[str]]:
    """The lines; an address is fetched whole before the model loads."""
    if not _is_url(where):
        with open(where, encoding="utf-8") as file:
            yield file
        return
    with tempfile.TemporaryFile("w+", encoding="utf-8") as file:
        try:
            async with httpx.AsyncClient(follow_redirects=True, timeout=300) as http, http.stream("GET", where) as answer:
                answer.raise_for_status()
                async for text in answer.aiter_text():
                    file.write(text)
        except httpx.HTTPError as error:
            raise PagodaError(f"--input-file {where} cannot be fetched: {error}") from error
        file.seek(0)
        yield file


@asynccontextmanager
async def _written(where: str) -> AsyncIterator[IO[str]]:
    """What takes the replies; for an address a file that is sent at the end."""
    if not _is_url(where):
        try:
            opened = open(where, "w", encoding="utf-8")  # noqa: SIM115  only its opening is a wrong flag
        except OSError as error:
            raise ConfigError(f"--output-file {where}: {error.strerror}") from error
        with opened as file:
            yield file
        return
    with tempfile.TemporaryFile("w+", encoding="utf-8") as file:
        yield file
        file.seek(0)
        content = await asyncio.to_thread(file.buffer.read)
        try:
            async with httpx.AsyncClient(timeout=300) as http:
                (await http.put(where, content=content)).raise_for_status()
        except httpx.HTTPError as error:
            raise PagodaError(f"--output-file {where} does not take the replies: {error}") from error
