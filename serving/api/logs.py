"""The server's log. Apart from `server.py`, since it is set up before anything heavy is imported."""

from __future__ import annotations

import logging

from pagoda.serving.api.config import ServerConfig
from pagoda.serving.engine.logs import LogSettings, set_up


def set_up_logging(config: ServerConfig) -> None:
    """A line a message on standard error, for us and for the HTTP library."""
    set_up(LogSettings(logging.getLevelNamesMapping()[config.log_level.upper()], config.log_format))
    if config.log_level != "debug":
        logging.getLogger("uvicorn.error").setLevel(logging.WARNING)  # it tells every start and stop
