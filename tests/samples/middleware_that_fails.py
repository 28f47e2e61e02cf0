"""An ASGI middleware with a bug, for tests of what is said of one."""

from __future__ import annotations

from typing import Any


class Fails:
    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        raise RuntimeError("broken on purpose")
