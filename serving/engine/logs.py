"""Logs of all our processes alike: lines for people, or a JSON object a line, with the id of the request that a line is about."""

from __future__ import annotations

import json
import logging
import sys
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Literal, NamedTuple

REQUEST: ContextVar[str] = ContextVar("pagoda.request", default="")
"""The id of the request that a task works for; empty elsewhere."""

LINES = "%(asctime)s %(levelname).1s %(name)s: %(message)s"


class LogSettings(NamedTuple):
    """Least level, and form of each record."""

    level: int
    form: Literal["text", "json"] = "text"


class JsonFormatter(logging.Formatter):
    """`time` (UTC), `level`, `logger`, `message`, `process`; `request_id` and `error` (a traceback) where there is one; of the access log
    `client`, `method`, `path` and `status` too."""

    def format(self, record: logging.LogRecord) -> str:
        told: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "process": record.process,
        }
        if request_id := REQUEST.get():
            told["request_id"] = request_id
        if record.name == "uvicorn.access" and isinstance(record.args, tuple) and len(record.args) == 5:
            told["client"], told["method"], told["path"], _, told["status"] = record.args
        if record.exc_info:
            told["error"] = self.formatException(record.exc_info)
        return json.dumps(told, ensure_ascii=False, default=str)


def set_up(settings: LogSettings) -> None:
    """Records go to standard error; nothing changes where this process logs already."""
    root = logging.getLogger()
    if root.handlers:
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if settings.form == "json" else logging.Formatter(LINES, "%H:%M:%S"))
    root.addHandler(handler)
    root.setLevel(settings.level)


def settings_here() -> LogSettings | None:
    """Of this process's log, None where it has none of ours."""
    root = logging.getLogger()
    for handler in root.handlers:
        if type(handler.formatter) in (JsonFormatter, logging.Formatter):
            return LogSettings(root.level, "json" if isinstance(handler.formatter, JsonFormatter) else "text")
    return None
