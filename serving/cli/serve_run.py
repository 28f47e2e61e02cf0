"""What `pagoda serve` does beside the start of its engine's process: its options, its log, its server."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

from pagoda.hal import heap
from pagoda.serving.api.config import ServerConfig
from pagoda.serving.api.logs import set_up_logging
from pagoda.serving.api.shared_metrics import shared_metrics
from pagoda.serving.cli.compat import foreign
from pagoda.serving.cli.flags import Parser, build
from pagoda.serving.cli.words import with_model
from pagoda.serving.engine.child import Child
from pagoda.serving.engine.config import EngineConfig


def run(argv: Sequence[str], started: float, child: Child) -> int:
    """Serve; `child` is the engine's process, begun at `started`."""
    values = with_model(options().values(argv))
    engine_config, server_config = build(EngineConfig, values), build(ServerConfig, values)
    set_up_logging(server_config)
    with shared_metrics(server_config.api_server_count > 1):
        with heap.only_growing():
            launch = import_module("pagoda.serving.api.launch")
        return int(launch.run(engine_config, server_config, started, child))


def options() -> Parser:
    """Every option of the command; the flags of `vllm serve` that are none of ours are read as `compat.py` says."""
    parser = Parser("serve", "Serve a model over HTTP: OpenAI's API and more.", "[MODEL] [options]", words=1)
    parser.add_config(EngineConfig)
    parser.add_config(ServerConfig, "Server")
    parser.add_config_file()
    parser.add_foreign(foreign(parser.spellings))
    return parser
