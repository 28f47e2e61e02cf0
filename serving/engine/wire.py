"""The messages between a client and an engine process, in msgpack. Needs msgspec, which only servers have."""

from __future__ import annotations

from typing import Any

import msgspec
from pagoda.hal import errors
from pagoda.hal.errors import EngineDeadError, PagodaError, RequestError
from pagoda.serving.engine.messages import EngineRequest, StepDeltas


class Submit(msgspec.Struct, tag=True, array_like=True):
    """A request for the engine."""

    request: EngineRequest


class Abort(msgspec.Struct, tag=True, array_like=True):
    """End these requests, or one sequence of each."""

    request_ids: list[str]
    sequence: int | None = None


class Call(msgspec.Struct, tag=True, array_like=True):
    """A control call; the answer has the same number."""

    number: int
    method: str
    arguments: dict[str, Any]


class Join(msgspec.Struct, tag=True, array_like=True):
    """Another client is there: where it sends requests to, and where it waits for answers."""

    name: str
    requests: str
    answers: str


class Leave(msgspec.Struct, tag=True, array_like=True):
    """A client that joined is gone: end its requests, and send it nothing more."""

    name: str


class ErrorRecord(msgspec.Struct, array_like=True):
    """An error of our tree by its class's name."""

    kind: str
    message: str
    param: str | None = None
    code: str | None = None


class Deltas(msgspec.Struct, tag=True, array_like=True):
    """What a step gave."""

    deltas: StepDeltas


class Rejected(msgspec.Struct, tag=True, array_like=True):
    """A request that was refused."""

    request_id: str
    error: ErrorRecord


class Answer(msgspec.Struct, tag=True, array_like=True):
    """Of a control call."""

    number: int
    value: Any
    error: ErrorRecord | None = None


class Adapters(msgspec.Struct, tag=True, array_like=True):
    """Those that are loaded from now on: name, folder, parent."""

    loaded: list[tuple[str, str, str | None]]


ToEngine = Submit | Abort | Call | Join | Leave
FromEngine = Deltas | Rejected | Answer | Adapters

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_plain = msgspec.msgpack.Decoder().decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode


def record(error: BaseException) -> ErrorRecord:
    """An error as it crosses; strangers become `EngineDeadError`."""
    if not isinstance(error, PagodaError):
        return ErrorRecord(EngineDeadError.__name__, repr(error))
    return ErrorRecord(type(error).__name__, str(error), getattr(error, "param", None), getattr(error, "code", None))


def error_of(crossed: ErrorRecord) -> PagodaError:
    """The same class with the same message."""
    kind = getattr(errors, crossed.kind)
    if issubclass(kind, RequestError):
        request_error: PagodaError = kind(crossed.message, param=crossed.param, code=crossed.code)
        return request_error
    other: PagodaError = kind(crossed.message)
    return other
