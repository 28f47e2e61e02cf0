"""Which protocol a request speaks, by its path, so that even what fails before its endpoint is told in that protocol's errors."""

from __future__ import annotations

from pagoda.serving.api.anthropic import errors as anthropic
from pagoda.serving.api.errors import envelope, openai_response
from pagoda.serving.api.stream_events import DONE, event
from starlette.responses import Response
from starlette.types import Scope

_ANTHROPIC = "/v1/messages"


def path_of(scope: Scope) -> str:
    """The path below the place where a proxy mounts the server."""
    return str(scope["path"]).removeprefix(scope.get("root_path", "")) or "/"


def error_response(error: BaseException, scope: Scope) -> Response:
    """The whole reply for a failed request."""
    return anthropic.response_of(error, _id(scope)) if _is_anthropic(scope) else openai_response(error)


def error_event(error: BaseException, scope: Scope) -> bytes:
    """The last event of a stream that failed."""
    return anthropic.event_of(error, _id(scope)) if _is_anthropic(scope) else event(envelope(error)) + DONE


def id_headers(scope: Scope) -> tuple[bytes, ...]:
    """Headers in which the reply says the request's id."""
    return (b"x-request-id", b"request-id") if _is_anthropic(scope) else (b"x-request-id",)


def _is_anthropic(scope: Scope) -> bool:
    path = path_of(scope)
    return path == _ANTHROPIC or path.startswith(_ANTHROPIC + "/")


def _id(scope: Scope) -> str | None:
    return scope.get("state", {}).get("request_id")
