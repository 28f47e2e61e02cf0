"""`POST /start_profile` and `POST /stop_profile`: a trace of the engine's steps in between."""

from __future__ import annotations

import msgspec
from pagoda.serving.api.service import Service
from starlette.requests import Request
from starlette.responses import Response


class Traces(msgspec.Struct, kw_only=True):
    """Reply of `/stop_profile`: the files that were written, a rank each."""

    files: list[str]


class Profiling:
    """The endpoints, of servers with `--profiler-config`."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def start(self, request: Request) -> Response:
        self._service.check_open()
        await self._service.client.call("start_profile")
        return Response(b"")

    async def stop(self, request: Request) -> Response:
        self._service.check_open()
        files = await self._service.client.call("stop_profile")
        return Response(msgspec.json.encode(Traces(files=msgspec.convert(files, list[str]))), media_type="application/json")
