"""`pagoda serve`: a model over HTTP. The engine is a process of its own; this one speaks the protocols and makes text."""

from __future__ import annotations

import time
from collections.abc import Sequence
from importlib import import_module

from pagoda.serving.api.config import ServerConfig
from pagoda.serving.api.logs import set_up_logging
from pagoda.serving.api.shared_metrics import shared_metrics
from pagoda.serving.cli.compat import foreign
from pagoda.serving.cli.flags import Parser, build
from pagoda.serving.cli.words import with_model
from pagoda.serving.engine.child import engine_child
from pagoda.serving.engine.config import EngineConfig


def run(argv: Sequence[str]) -> int:
    started = time.monotonic()
    values = with_model(options().values(argv))
    engine_config, server_config = build(EngineConfig, values), build(ServerConfig, values)
    set_up_logging(server_config)  # before the child, which logs alike
    child = engine_child()  # torch is the longest import of a start: the server's own run beside it
    try:
        with shared_metrics(server_config.api_server_count > 1):
            return int(import_module("pagoda.serving.api.launch").run(engine_config, server_config, started, child))
    finally:
        child.kill()


def options() -> Parser:
    """Every option of the command; the flags of `vllm serve` that are none of ours are read as `compat.py` says."""
    parser = Parser("serve", "Serve a model over HTTP: OpenAI's API and more.", "[MODEL] [options]", words=1)
    parser.add_config(EngineConfig)
    parser.add_config(ServerConfig, "Server")
    parser.add_config_file()
    parser.add_foreign(foreign(parser.spellings))
    return parser
