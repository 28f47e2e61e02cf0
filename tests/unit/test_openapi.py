"""`/openapi.json`: all that is mounted stands in it, it is a valid document, and answers are what it says."""

from __future__ import annotations

import httpx
import msgspec
import pytest
from jsonschema import Draft202012Validator
from pagoda.serving.api.app import build_app
from pagoda.serving.api.config import ServerConfig
from pagoda.serving.api.openapi import document
from pagoda.serving.api.operations_table import OPERATIONS
from pagoda.serving.api.service import ModelCard, Service
from starlette.routing import Route
from toy_engine import ToyEngine, toy_text
from toy_server import toy_server


def test_every_route_is_told_once() -> None:
    service = Service(ToyEngine(), toy_text(), ModelCard(("toy",), "toy"), ServerConfig())
    routes = {
        (route.path.replace(":path", ""), method)
        for route in build_app(service).routes
        if isinstance(route, Route)
        for method in (route.methods or ()) - {"HEAD"}
    }
    told = [(one.path, one.method) for one in OPERATIONS]
    assert set(told) == routes
    assert len(set(told)) == len(told) and len({one.name for one in OPERATIONS}) == len(told)


def test_every_reference_leads_somewhere() -> None:
    made = msgspec.json.decode(msgspec.json.encode(document("1")))
    schemas = made["components"]["schemas"]

    def references(node: object) -> list[str]:
        if isinstance(node, dict):
            here = [str(node["$ref"])] if "$ref" in node else []
            return here + [found for value in node.values() for found in references(value)]
        return [found for value in node for found in references(value)] if isinstance(node, list) else []

    assert {one.removeprefix("#/components/schemas/") for one in references(made)} <= set(schemas)
    for name, schema in schemas.items():
        Draft202012Validator.check_schema(schema)
        assert schema.get("type") == "object", name


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("post", "/v1/completions", {"prompt": "ab", "logprobs": 1, "return_token_ids": True}),
        ("post", "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("post", "/v1/responses", {"input": "x"}),
        ("post", "/v1/messages", {"model": "toy", "max_tokens": 3, "messages": [{"role": "user", "content": "x"}]}),
        ("post", "/v1/messages/count_tokens", {"model": "toy", "messages": [{"role": "user", "content": "x"}]}),
        ("post", "/tokenize", {"prompt": "ab"}),
        ("post", "/detokenize", {"tokens": [65]}),
        ("post", "/inference/v1/generate", {"token_ids": [65, 66]}),
        ("post", "/v1/completions/render", {"prompt": ["a", "b"]}),
        ("get", "/v1/models", None),
        ("get", "/v1/models/{name}", None),
        ("get", "/tokenizer_info", None),
        ("post", "/v1/embeddings", {"input": "x"}),
        ("get", "/v1/responses/{response_id}", None),
    ],
)
async def test_answers_are_what_the_document_says(method: str, path: str, body: object) -> None:
    async with toy_server() as toy:
        made = (await toy.http.get("/openapi.json")).json()
        where = path.replace("{name}", "toy").replace("{response_id}", "none")
        answer: httpx.Response = await toy.http.request(method, where, json=body)
    content = made["paths"][path][method]["responses"][str(answer.status_code)]["content"]["application/json"]["schema"]
    Draft202012Validator({**content, "components": made["components"]}).validate(answer.json())
    assert answer.status_code == {"/v1/embeddings": 400, "/v1/responses/{response_id}": 404}.get(path, 200), answer.text
