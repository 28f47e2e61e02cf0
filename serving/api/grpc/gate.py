"""What every call passes: the key, the client's limits, and errors as gRPC statuses."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from typing import Any, TypeVar

import grpc
from grpc.aio import ServicerContext
from pagoda.serving.api.errors import answer_for, headers_for, message_of
from pagoda.serving.api.keys import CLIENT, KeyRing, keys_of, missing_key
from pagoda.serving.api.service import Service
from pagoda.serving.api.stream import log_internal

T = TypeVar("T")

_STATUS = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    404: grpc.StatusCode.NOT_FOUND,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
"""By the status that the same error has over HTTP."""


class Gate:
    """One server's."""

    def __init__(self, service: Service) -> None:
        self._service = service
        keys = keys_of(service.config)
        self._ring = KeyRing(keys) if keys else None

    async def run(self, context: ServicerContext, work: Callable[[str], Awaitable[T]], *, counted: bool = True) -> T:
        """Do a call's work, given the client's name, or end the call with the status of its error. `counted`: as its request."""
        try:
            with self._traced(context):
                async with self._counted(self._client(context), counted) as client:
                    return await work(client)
        except Exception as error:
            log_internal(error)
            await context.abort(status_of(error), message_of(error), _trailers(error))
            raise

    def _traced(self, context: ServicerContext) -> AbstractContextManager[None]:
        if self._service.tracing is None:
            return nullcontext()
        sent = {name: value for name, value in context.invocation_metadata() or () if isinstance(value, str)}
        return self._service.tracing.within(sent)

    def _client(self, context: ServicerContext) -> str:
        sent = {name: value.encode() if isinstance(value, str) else value for name, value in context.invocation_metadata() or ()}
        if self._ring is None:
            return str(context.peer()).rsplit(":", 1)[0]
        name = self._ring.name_of(sent.get("authorization", b""), sent.get("x-api-key", b""))
        if name is None:
            raise missing_key()
        CLIENT.set(name)  # a call is a task of its own
        return name

    @asynccontextmanager
    async def _counted(self, client: str, counted: bool) -> AsyncIterator[str]:
        if not (counted and self._service.config.limits_keys):
            yield client
            return
        await self._service.desk.enter(client)
        try:
            yield client
        finally:
            self._service.desk.leave(client)


def status_of(error: BaseException) -> grpc.StatusCode:
    """Of the same table as over HTTP."""
    return _STATUS.get(answer_for(error).status, grpc.StatusCode.INTERNAL)


def _trailers(error: BaseException) -> tuple[tuple[str, Any], ...]:
    """Which field is to blame, the protocol's code, and when to come again."""
    found = {"param": getattr(error, "param", None), "code": getattr(error, "code", None) or answer_for(error).code}
    found["retry-after"] = headers_for(error).get("Retry-After")
    return tuple((name, value) for name, value in found.items() if isinstance(value, str) and value.isascii())
