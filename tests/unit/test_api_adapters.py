"""Adapters over HTTP: their names in requests and in the list of models, loading and unloading, errors."""

from __future__ import annotations

from dataclasses import replace

from pagoda.hal.errors import NotFoundError, RequestError
from toy_engine import ToyEngine
from toy_server import toy_server


class AdaptedToy(ToyEngine):
    def __init__(self) -> None:
        super().__init__()
        self.facts = replace(self.facts, adapters=(("sql", "/adapters/sql", None),), adapter_slots=1)
        self.names = {"sql"}

    async def call(self, method: str, **arguments: object) -> object:
        name = str(arguments.get("name"))
        if method == "load_adapter":
            if name in self.names and not arguments["in_place"]:
                raise RequestError(f"adapter {name!r} is loaded already", param="lora_name")
            self.names.add(name)
            return {}
        if method == "unload_adapter":
            if name not in self.names:
                raise NotFoundError(f"adapter {name!r} is not loaded here", param="model")
            self.names.remove(name)
            return None
        return await super().call(method, **arguments)


async def test_a_request_names_an_adapter_as_its_model() -> None:
    async with toy_server(AdaptedToy()) as toy:
        for model, adapter in (("sql", "sql"), ("toy", None)):
            reply = await toy.complete(model=model)
            assert reply.json()["model"] == model and toy.engine.requests[-1].adapter == adapter
            assert (await toy.chat(model=model)).status_code == 200 and toy.engine.requests[-1].adapter == adapter
        unknown = await toy.complete(model="other")
        assert unknown.status_code == 404 and "sql" in unknown.json()["error"]["message"]


async def test_adapters_come_and_go() -> None:
    async with toy_server(AdaptedToy()) as toy:
        body = {"lora_name": "law", "lora_path": "/adapters/law"}
        assert "added" in (await toy.http.post("/v1/load_lora_adapter", json=body)).text
        models = {entry["id"]: entry for entry in (await toy.http.get("/v1/models")).json()["data"]}
        assert models["law"]["root"] == "/adapters/law" and models["law"]["parent"] == "toy" and models["toy"]["parent"] is None
        assert (await toy.http.get("/v1/models/law")).json()["id"] == "law"
        assert (await toy.http.post("/v1/load_lora_adapter", json=body)).status_code == 400
        assert (await toy.http.post("/v1/load_lora_adapter", json=body | {"load_inplace": True})).status_code == 200
        assert (await toy.http.post("/v1/load_lora_adapter", json=body | {"lora_name": "toy"})).status_code == 400
        assert "removed" in (await toy.http.post("/v1/unload_lora_adapter", json={"lora_name": "law"})).text
        assert (await toy.http.post("/v1/unload_lora_adapter", json={"lora_name": "law"})).status_code == 404
        assert (await toy.complete(model="law")).status_code == 404
