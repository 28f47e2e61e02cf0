"""`pagoda serve`: a model over HTTP. The engine is a process of its own; this one speaks the protocols and makes text."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import asdict, replace

from pagoda.models.loading.reference import resolve
from pagoda.serving.api.config import ServerConfig
from pagoda.serving.api.server import Server, bind, run_loop, set_up_logging
from pagoda.serving.api.service import ModelCard, Service
from pagoda.serving.cli.flags import Parser, build
from pagoda.serving.cli.words import with_model
from pagoda.serving.engine.build import engine_starter
from pagoda.serving.engine.config import EngineConfig
from pagoda.serving.engine.zmq_client import ZmqClient
from pagoda.serving.frontend.generation_config import sampling_defaults
from pagoda.serving.frontend.load import load_text
from pagoda.serving.frontend.text import TextFrontend


def run(argv: Sequence[str]) -> int:
    parser = Parser("serve", "Serve a model over HTTP: OpenAI's API and more.", "[MODEL] [options]", words=1)
    parser.add_config(EngineConfig)
    parser.add_config(ServerConfig, "Server")
    parser.add_config_file()
    values = with_model(parser.values(argv))
    engine, server = build(EngineConfig, values), build(ServerConfig, values)
    set_up_logging(server)
    with bind(server) as sock:  # before anything loads: an address in use is the commonest mistake
        path = resolve(engine.model, engine.revision)
        tokenizer = path if engine.tokenizer is None else resolve(engine.tokenizer, None)
        text = load_text(tokenizer, chat_template=server.chat_template)
        card = ModelCard(server.served_model_name or (engine.model,), str(path), sampling_defaults(path))
        return run_loop(lambda: _serve(replace(engine, model=str(path)), server, text, card, sock))


async def _serve(engine: EngineConfig, server: ServerConfig, text: TextFrontend, card: ModelCard, sock: socket.socket) -> int:
    client = await ZmqClient.start(engine_starter(engine))
    settings = {"engine": asdict(engine), "server": asdict(server) | {"api_key": len(server.api_key)}}
    return await Server(Service(client, text, card, server), sock, settings, stats=not engine.disable_log_stats).run()
