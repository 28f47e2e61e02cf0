"""`POST /sleep`, `POST /wake_up`, `GET /is_sleeping`: the engine's memory given to others for a while, as trainers do between rollouts."""

from __future__ import annotations

import msgspec
from pagoda.hal.errors import NotFoundError, RequestError
from pagoda.serving.api.service import Service
from starlette.requests import Request
from starlette.responses import Response

TAGS = {"weights": "weights", "kv_cache": "kv"}
"""The protocol's names of what wakes, and the engine's."""


class Sleeping:
    """The endpoints, of servers with `--enable-sleep-mode`: whoever may call them stops everybody's requests."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def sleep(self, request: Request) -> Response:
        """`level` 1 gives the KV cache back, 2 the weights too; refused while requests run."""
        level = request.query_params.get("level", "1")
        if level not in ("1", "2"):
            raise RequestError(f"level={level!r} is unknown; 1 drops the KV cache, 2 the weights too", param="level")
        with self._service.metrics.sleeping("sleep"):
            await self._call("sleep", level=int(level))
        return Response(b"")

    async def wake_up(self, request: Request) -> Response:
        """All that sleeps, or what each `tags` says; the weights not after the KV cache."""
        tags = request.query_params.getlist("tags")
        if unknown := [tag for tag in tags if tag not in TAGS]:
            raise RequestError(f"tags={unknown[0]!r} is unknown; there are: {', '.join(TAGS)}", param="tags")
        with self._service.metrics.sleeping("wake"):
            await self._call("wake", kinds=[TAGS[tag] for tag in tags] or None)
        return Response(b"")

    async def is_sleeping(self, request: Request) -> Response:
        asleep = bool(await self._call("is_sleeping"))
        return Response(msgspec.json.encode({"is_sleeping": asleep}), media_type="application/json")

    async def _call(self, method: str, **arguments: object) -> object:
        self._service.check_open()
        if not self._service.config.enable_sleep_mode:
            raise NotFoundError("this server does not let its engine sleep; start it with --enable-sleep-mode")
        return await self._service.client.call(method, **arguments)
