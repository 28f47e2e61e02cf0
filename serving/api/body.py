"""Request bodies: read with a limit, decoded, and turned into typed records with errors that name the field."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from pagoda.hal.errors import RequestError
from pagoda.serving.api.errors import BodyTooLargeError, MediaTypeError
from starlette.requests import ClientDisconnect, Request

log = logging.getLogger("pagoda.api")
S = TypeVar("S", bound=msgspec.Struct)
_AT = re.compile(r"^(?P<problem>.*?)(?: - at `(?:key` in `)?\$?\.?(?P<path>.*)`)?$", re.DOTALL)
_MISSING = re.compile(r"missing required field `(?P<name>\w+)`")


class BodyReader:
    """Reads JSON bodies up to a limit; remembers which unknown fields it has already warned of."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._warned: set[str] = set()
        self._known: dict[type[msgspec.Struct], frozenset[str]] = {}
        self._decoders: dict[type[msgspec.Struct], msgspec.json.Decoder[Any]] = {}
        self._keys = msgspec.json.Decoder(dict[str, msgspec.Raw])

    async def read(self, request: Request, kind: type[S]) -> S:
        """The body as a record. Raises `RequestError` (or a subclass) saying what is wrong where."""
        headers = dict(request.scope["headers"])
        media = headers.get(b"content-type", b"").partition(b";")[0].strip().lower().decode("latin-1")
        if media != "application/json":  # browsers ask before they send it to another origin
            raise MediaTypeError(f"the body is declared as {media or 'nothing'}; send JSON with `Content-Type: application/json`")
        return self.decode(await self._bytes(request, headers.get(b"content-length", b"0")), kind)

    def decode(self, body: bytes, kind: type[S]) -> S:
        """Right bodies are a record at once; what is wrong with others is found in their values."""
        decoder: msgspec.json.Decoder[S] | None = self._decoders.get(kind)
        if decoder is None:
            decoder = self._decoders[kind] = msgspec.json.Decoder(kind)
        try:
            record = decoder.decode(body)
            self._warn_of_unknown(self._keys.decode(body), kind)
            return record
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return self._explained(body, kind)

    def _explained(self, body: bytes, kind: type[S]) -> S:
        raw = _json(body)
        if not isinstance(raw, dict):
            raise RequestError(f"the body is a JSON {type(raw).__name__}; it must be an object")
        return self.typed(raw, kind)

    def typed(self, raw: dict[str, Any], kind: type[S]) -> S:
        """Decoded JSON as a record."""
        self._warn_of_unknown(raw, kind)
        return converted(raw, kind)

    async def _bytes(self, request: Request, declared: bytes) -> bytes:
        if declared.isdigit() and int(declared) > self._limit:
            raise self._too_large(int(declared))
        parts: list[bytes] = []
        size, more = 0, True
        while more:
            message = await request.receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            parts.append(part := message.get("body", b""))
            if (size := size + len(part)) > self._limit:
                raise self._too_large(size)
            more = message.get("more_body", False)
        return b"".join(parts)

    def _too_large(self, size: int) -> BodyTooLargeError:
        return BodyTooLargeError(f"the body has {size} bytes or more, the limit is {self._limit}; the flag is --max-request-bytes")

    def _warn_of_unknown(self, raw: Mapping[str, Any], kind: type[msgspec.Struct]) -> None:
        known = self._known.get(kind)
        if known is None:
            known = self._known[kind] = frozenset(kind.__struct_fields__)
        if raw.keys() <= known:
            return
        for name in raw.keys() - known - self._warned:
            if len(self._warned) < 1000:
                self._warned.add(name)
                log.warning("%s: the field %.100r is unknown and ignored (said once)", kind.__name__, name)


def converted(raw: dict[str, Any], kind: type[S]) -> S:
    """Fields as a typed record. Raises `RequestError` naming the field that is wrong."""
    try:
        return msgspec.convert(raw, kind, str_keys=True)
    except msgspec.ValidationError as error:
        with contextlib.suppress(msgspec.ValidationError, RecursionError):
            return msgspec.convert(_whole_numbers(raw), kind, str_keys=True)
        raise _field_error(str(error)) from None


def _whole_numbers(value: Any) -> Any:
    """4.0 as 4, which are one number in JSON; clients write either. Where a float is wanted, 4 is one."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {name: _whole_numbers(one) for name, one in value.items()}
    return [_whole_numbers(one) for one in value] if isinstance(value, list) else value


def _json(body: bytes) -> Any:
    try:
        body.decode()
    except UnicodeDecodeError as error:
        raise RequestError(f"the body is not UTF-8: byte {body[error.start]:#04x} at offset {error.start}") from None
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise RequestError(f"the body is not JSON: {error}") from None


def _field_error(text: str) -> RequestError:
    match = _AT.match(text)
    problem, path = (match["problem"], match["path"]) if match else (text, None)
    if missing := _MISSING.search(problem):
        name = f"{path}.{missing['name']}" if path else missing["name"]
        return RequestError(f"{name} is missing; it is required", param=name, code="missing_field")
    name = path or None
    lead = f"{name}: " if name else ""
    return RequestError(f"{lead}{problem[:1].lower()}{problem[1:]}", param=name, code="invalid_type")
