"""Multipart forms of audio requests, with errors that name the field."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from pagoda.hal.errors import ConfigError, RequestError
from pagoda.serving.api.body import converted
from pagoda.serving.api.errors import BodyTooLargeError, MediaTypeError
from starlette.datastructures import UploadFile
from starlette.requests import Request

Format = Literal["json", "text", "srt", "vtt", "verbose_json"]


class AudioRequest(msgspec.Struct, kw_only=True):
    """The fields of a request but its file."""

    model: str | None = None
    language: str | None = None
    prompt: str | None = None
    response_format: Format = "json"
    temperature: float = 0.0
    timestamp_granularities: list[Literal["segment", "word"]] = []
    stream: bool = False
    top_p: float | None = None
    seed: int | None = None
    max_completion_tokens: int | None = None


class AudioForm(msgspec.Struct):
    """A request and the bytes of its file."""

    fields: AudioRequest
    content: bytes


async def read_form(request: Request, limit: int) -> AudioForm:
    """Raises `RequestError` (or a subclass) saying what is wrong where."""
    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        raise MediaTypeError("the body is no form; send multipart/form-data with the field `file`")
    declared = request.headers.get("content-length", "")
    if not declared.isdecimal() or int(declared) > limit:
        raise BodyTooLargeError(f"the body has {declared or 'no known number of'} bytes, the limit is {limit}; see --max-request-bytes")
    try:
        async with request.form() as form:
            file = form.get("file")
            if not isinstance(file, UploadFile):
                raise RequestError("file is missing; it is required", param="file", code="missing_field")
            names = {key for key in form if key != "file"}
            fields = {key.removesuffix("[]"): _value(key, form.getlist(key)) for key in names}
            return AudioForm(_typed(fields), await file.read())
    except AssertionError as error:  # starlette asserts that python-multipart is there
        raise ConfigError(f"forms cannot be read: {error}; pip install 'pagoda-llm[audio]'") from None


def _value(key: str, given: list[Any]) -> Any:
    return given if key.removesuffix("[]") == "timestamp_granularities" else given[-1]


def _typed(fields: dict[str, Any]) -> AudioRequest:
    for name, kind in (("temperature", float), ("top_p", float), ("seed", int), ("max_completion_tokens", int)):
        if name in fields:
            try:
                fields[name] = kind(fields[name])
            except ValueError:
                raise RequestError(f"{name}={fields[name]!r} is no number", param=name, code="invalid_type") from None
    if "stream" in fields:
        fields["stream"] = str(fields["stream"]).lower() in ("true", "1")
    body = converted(fields, AudioRequest)
    if "word" in body.timestamp_granularities:
        raise RequestError("times of words are not made; ask for segments", param="timestamp_granularities", code="unsupported_parameter")
    if body.timestamp_granularities and body.response_format != "verbose_json":
        raise RequestError("timestamp_granularities needs response_format=verbose_json", param="timestamp_granularities")
    return body
