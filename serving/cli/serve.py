"""`pagoda serve`: a model over HTTP. The engine is a process of its own; this one speaks the protocols and makes text."""

from __future__ import annotations

import time
from collections.abc import Sequence

from pagoda.serving.api import launch
from pagoda.serving.api.config import ServerConfig
from pagoda.serving.cli.compat import foreign
from pagoda.serving.cli.flags import Parser, build
from pagoda.serving.cli.words import with_model
from pagoda.serving.engine.config import EngineConfig


def run(argv: Sequence[str]) -> int:
    started = time.monotonic()
    values = with_model(options().values(argv))
    return launch.run(build(EngineConfig, values), build(ServerConfig, values), started)


def options() -> Parser:
    """Every option of the command; the flags of `vllm serve` that are none of ours are read as `compat.py` says."""
    parser = Parser("serve", "Serve a model over HTTP: OpenAI's API and more.", "[MODEL] [options]", words=1)
    parser.add_config(EngineConfig)
    parser.add_config(ServerConfig, "Server")
    parser.add_config_file()
    parser.add_foreign(foreign(parser.spellings))
    return parser
