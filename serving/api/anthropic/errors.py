"""Errors as clients of the Messages protocol see them."""

from __future__ import annotations

import msgspec
from pagoda.hal.errors import EngineDeadError
from pagoda.serving.api.errors import DrainingError, OverloadedError, answer_for, headers_for, message_of
from starlette.responses import Response

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}
"""The protocol's `type` for each status; any other is an `api_error`."""

_OVERLOADED = 529


class ErrorDetail(msgspec.Struct):
    """What is wrong."""

    type: str
    message: str


class ErrorRecord(msgspec.Struct, kw_only=True):
    """What a failed request is answered with, and what a failing stream sends as its last event."""

    type: str = "error"
    error: ErrorDetail
    request_id: str | None


def record_of(error: BaseException, request_id: str | None) -> ErrorRecord:
    """The error object."""
    return ErrorRecord(error=ErrorDetail(TYPES.get(_status(error), "api_error"), message_of(error)), request_id=request_id)


def response_of(error: BaseException, request_id: str | None) -> Response:
    """The whole reply for a failed request."""
    return Response(msgspec.json.encode(record_of(error, request_id)), _status(error), headers_for(error), "application/json")


def event_of(error: BaseException, request_id: str | None) -> bytes:
    """The same inside a stream."""
    return b"event: error\ndata: " + msgspec.json.encode(record_of(error, request_id)) + b"\n\n"


def _status(error: BaseException) -> int:
    if isinstance(error, OverloadedError | DrainingError):
        return _OVERLOADED
    return 500 if isinstance(error, EngineDeadError) else answer_for(error).status
