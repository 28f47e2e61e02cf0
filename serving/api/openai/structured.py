"""Fields that say what an answer must look like: `response_format`, `structured_outputs`, and its older forms `guided_…`."""

from __future__ import annotations

from typing import Any

from pagoda.hal.errors import RequestError
from pagoda.serving.api.openai.protocol import GenerationRequest
from pagoda.serving.engine.structured import StructuredOutputsParams
from pagoda.serving.frontend.structured.starter import installed

_GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
_FORMATS = "text, json_object, json_schema and structural_tag"


def structured_output(request: GenerationRequest) -> StructuredOutputsParams | None:
    """None for text. Raises `RequestError` for a format that there is not, and where two fields ask for one."""
    found = [one for one in (_of_format(request), _of_object(request), *_of_guided(request)) if one is not None]
    if not found:
        return None
    if len(found) > 1:
        names = " and ".join(one.origin for one in found)
        raise RequestError(f"{names} each say what the answer must look like; send one of them", param=found[1].origin)
    check_installed(found[0].origin)
    return found[0]


def check_installed(param: str) -> None:
    """Raises `RequestError` where no grammar can be followed."""
    if not installed():
        raise refused(
            f'{param} is not supported by this server: it lacks the packages xgrammar and llguidance; pip install "pagoda-llm[structured]"',
            param,
        )


def _of_format(request: GenerationRequest) -> StructuredOutputsParams | None:
    wanted, name = request.response_format, "response_format"
    if wanted is None or wanted.get("type") == "text":
        return None
    kind = wanted.get("type")
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True, origin=name)
    if kind == "json_schema":
        return StructuredOutputsParams(json=_schema(wanted.get("json_schema")), origin=name)
    if kind == "structural_tag":
        return StructuredOutputsParams(structural_tag=wanted, origin=name)
    raise refused(f"response_format.type={kind!r} is not supported by this server; there is {_FORMATS}", name)


def _of_object(request: GenerationRequest) -> StructuredOutputsParams | None:
    given = {key: value for key, value in (request.structured_outputs or {}).items() if value is not None}
    return StructuredOutputsParams.of(given) if given else None


def _of_guided(request: GenerationRequest) -> list[StructuredOutputsParams]:
    given = ((name, key, getattr(request, name)) for name, key in _GUIDED.items())
    return [StructuredOutputsParams.of({key: value}, name) for name, key, value in given if value is not None]


def _schema(given: Any) -> dict[str, Any] | bool:
    schema = given.get("schema") if isinstance(given, dict) else None
    if not isinstance(schema, dict | bool):
        raise RequestError("response_format.json_schema.schema is missing; it must be a JSON schema", param="response_format")
    return schema


def refused(message: str, param: str) -> RequestError:
    return RequestError(message, param=param, code="unsupported_parameter")
