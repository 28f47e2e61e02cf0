"""Middleware of those who run the server: classes and functions by their import paths."""

from __future__ import annotations

import inspect
from importlib import import_module

from pagoda.hal.errors import ConfigError
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware


def user_middleware(paths: tuple[str, ...]) -> list[Middleware]:
    """The last given is the outermost. Raises `ConfigError` for what cannot be imported or is no middleware."""
    return [_loaded(path) for path in reversed(paths)]


def _loaded(path: str) -> Middleware:
    module, _, name = path.rpartition(".")
    try:
        found = getattr(import_module(module), name)
    except Exception as error:  # whatever the module does when it is imported
        raise ConfigError(f"--middleware {path} cannot be imported: {error!r}; give MODULE.NAME of something on PYTHONPATH") from error
    if inspect.isclass(found):
        return Middleware(found)
    if inspect.iscoroutinefunction(found):
        return Middleware(BaseHTTPMiddleware, dispatch=found)
    kind = type(found).__name__
    raise ConfigError(f"--middleware {path} is {kind}; it must be an ASGI class, or a coroutine function of request and call_next")
