"""Errors as clients see them: one table from Pagoda's error tree to HTTP status, and OpenAI's error object."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
from pagoda.hal.errors import CapacityError, EngineDeadError, NotFoundError, PagodaError, RequestError
from starlette.responses import Response


class OverloadedError(CapacityError):
    """The queue is full; the client may try again after `retry_after` seconds."""

    def __init__(self, message: str, *, asked: int | None = None, available: int | None = None, retry_after: int = 1) -> None:
        super().__init__(message, asked=asked, available=available)
        self.retry_after = retry_after


class RateLimitedError(PagodaError):
    """A client sends more than its share; it may try again after `retry_after` seconds."""

    def __init__(self, message: str, *, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class RequestTimeoutError(PagodaError):
    """The request ran longer than the server lets any run."""


class AbortedError(PagodaError):
    """Somebody ended the request by its id, in a protocol that has no word for such an end."""


class DrainingError(PagodaError):
    """The server is shutting down and takes no new requests."""


class AuthenticationError(PagodaError):
    """The request brings no key, or a wrong one."""


class BodyTooLargeError(RequestError):
    """The request body is above the server's limit."""


class MediaTypeError(RequestError):
    """The request body is not declared to be JSON."""


class Answer(NamedTuple):
    """HTTP status, and the protocol's `type` and default `code`."""

    status: int
    type: str
    code: str | None = None


STATUS: dict[type[BaseException], Answer] = {
    BodyTooLargeError: Answer(413, "invalid_request_error", "request_too_large"),
    MediaTypeError: Answer(415, "invalid_request_error", "unsupported_media_type"),
    NotFoundError: Answer(404, "invalid_request_error", "not_found"),
    RequestError: Answer(400, "invalid_request_error"),
    AuthenticationError: Answer(401, "authentication_error", "invalid_api_key"),
    OverloadedError: Answer(429, "overloaded_error", "queue_full"),
    RateLimitedError: Answer(429, "rate_limit_error", "rate_limit_exceeded"),
    RequestTimeoutError: Answer(504, "timeout_error", "request_timeout"),
    AbortedError: Answer(499, "invalid_request_error", "aborted"),
    DrainingError: Answer(503, "service_unavailable_error", "shutting_down"),
    EngineDeadError: Answer(503, "service_unavailable_error", "engine_dead"),
    CapacityError: Answer(400, "invalid_request_error", "capacity_exceeded"),
    PagodaError: Answer(500, "internal_error"),
}


class ErrorBody(msgspec.Struct):
    """The `error` object of OpenAI's protocol."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorEnvelope(msgspec.Struct):
    """What a failed request is answered with, and what a failing stream sends as its last event."""

    error: ErrorBody


def answer_for(error: BaseException) -> Answer:
    """The row of the table for the error's nearest class; anything that is not ours is a 500."""
    for kind in type(error).__mro__:
        if kind in STATUS:
            return STATUS[kind]
    return Answer(500, "internal_error")


def message_of(error: BaseException) -> str:
    """What the client is told; the text of errors that are not ours stays in the log."""
    return str(error) if isinstance(error, PagodaError) else "internal error; the server's log has the details"


def headers_for(error: BaseException) -> dict[str, str]:
    """Headers that go with the error's status: when to come again, and how to show a key."""
    status = answer_for(error).status
    retry = {"Retry-After": str(getattr(error, "retry_after", 1))} if status in (429, 503) else {}
    return retry | ({"WWW-Authenticate": "Bearer"} if status == 401 else {})


def envelope(error: BaseException) -> ErrorEnvelope:
    """The error object of OpenAI's protocol."""
    answer = answer_for(error)
    param, code = getattr(error, "param", None), getattr(error, "code", None)
    return ErrorEnvelope(ErrorBody(message_of(error), answer.type, param, code or answer.code))


def openai_response(error: BaseException) -> Response:
    """The whole reply for a failed request in OpenAI's protocol."""
    return Response(msgspec.json.encode(envelope(error)), answer_for(error).status, headers_for(error), "application/json")
