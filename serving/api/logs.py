"""The server's log. Apart from `server.py`, since it is set up before anything heavy is imported."""

from __future__ import annotations

import logging
import sys

from pagoda.serving.api.config import ServerConfig


def set_up_logging(config: ServerConfig) -> None:
    """One line a message on standard error, for us and for the HTTP library."""
    logging.basicConfig(
        level=config.log_level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname).1s %(name)s: %(message)s", datefmt="%H:%M:%S"
    )
    if config.log_level != "debug":
        logging.getLogger("uvicorn.error").setLevel(logging.WARNING)  # it tells every start and stop
