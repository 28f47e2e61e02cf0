"""`pagoda serve`: a model over HTTP. The engine is a process of its own; this one speaks the protocols and makes text."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from pagoda.models.loading.reference import resolve
from pagoda.serving.api.config import ServerConfig
from pagoda.serving.api.server import Server, bind, run_loop, set_up_logging
from pagoda.serving.api.service import ModelCard, Service
from pagoda.serving.cli.flags import Parser, build
from pagoda.serving.cli.words import with_model
from pagoda.serving.engine.config import EngineConfig
from pagoda.serving.engine.starter import deferred_starter
from pagoda.serving.engine.zmq_client import ZmqClient
from pagoda.serving.frontend.generation_config import sampling_defaults
from pagoda.serving.frontend.load import load_text, tokenizer_path
from pagoda.serving.frontend.text import TextFrontend


def run(argv: Sequence[str]) -> int:
    started = time.monotonic()
    parser = Parser("serve", "Serve a model over HTTP: OpenAI's API and more.", "[MODEL] [options]", words=1)
    parser.add_config(EngineConfig)
    parser.add_config(ServerConfig, "Server")
    parser.add_config_file()
    values = with_model(parser.values(argv))
    engine, server = build(EngineConfig, values), build(ServerConfig, values)
    set_up_logging(server)
    with bind(server) as sock:  # before anything loads: an address in use is the commonest mistake
        path = resolve(engine.model, engine.revision)
        return run_loop(lambda: _serve(engine, server, path, sock, started))


async def _serve(engine: EngineConfig, server: ServerConfig, path: Path, sock: socket.socket, started: float) -> int:
    client, text = await _start(replace(engine, model=str(path)), server)
    card = ModelCard(server.served_model_name or (engine.model,), str(path), sampling_defaults(path))
    settings = {"engine": asdict(engine), "server": asdict(server) | {"api_key": len(server.api_key)}}
    service = Service(client, text, card, server)
    return await Server(service, sock, settings, stats=not engine.disable_log_stats, started=started).run()


async def _start(engine: EngineConfig, server: ServerConfig) -> tuple[ZmqClient, TextFrontend]:
    starting = asyncio.create_task(ZmqClient.start(deferred_starter(engine)))
    await asyncio.sleep(0)  # from here its process runs, while this one reads the tokenizer
    try:
        text = load_text(tokenizer_path(engine), chat_template=server.chat_template)
    except BaseException:
        starting.cancel()
        await asyncio.wait([starting])
        raise
    return await starting, text
