"""`POST /abort_requests` and `/inference/v1/abort_requests`: requests ended by their ids, whichever API process they run in."""

from __future__ import annotations

import msgspec
from pagoda.hal.errors import RequestError
from pagoda.serving.api.body import BodyReader
from pagoda.serving.api.keys import CLIENT
from pagoda.serving.api.openai.protocol import Name
from pagoda.serving.api.service import Service
from starlette.requests import Request
from starlette.responses import Response


class AbortRequest(msgspec.Struct, kw_only=True):
    """Ids as replies have them, as clients gave them (`request_id`, `X-Request-Id`), or as the engine knows them."""

    request_ids: list[Name] | None = None


class Aborted(msgspec.Struct, kw_only=True):
    """`request_ids`: those that ran, `aborted`: how many."""

    status: str = "aborted"
    aborted: int
    request_ids: list[str]


class Aborts:
    """The endpoints. A key ends its own requests only."""

    def __init__(self, service: Service, bodies: BodyReader) -> None:
        self._service, self._bodies = service, bodies

    async def of_trainers(self, request: Request) -> Response:
        """Without ids: all."""
        body = await self._bodies.read(request, AbortRequest)
        return await self._end(body.request_ids or None)

    async def of_routers(self, request: Request) -> Response:
        """Ids are required: a router that shares the server must not end what is not its own by a slip."""
        body = await self._bodies.read(request, AbortRequest)
        if body.request_ids is None:
            raise RequestError("request_ids is missing; it is required", param="request_ids", code="missing_field")
        return await self._end(body.request_ids)

    async def _end(self, names: list[str] | None) -> Response:
        found = await self._service.desk.abort(names, CLIENT.get())
        return Response(msgspec.json.encode(Aborted(aborted=len(found), request_ids=found)), media_type="application/json")
