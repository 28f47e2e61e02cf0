"""`GET /v1/models` and `GET /v1/models/{id}`."""

from __future__ import annotations

import msgspec
from pagoda.serving.api.openai.replies import ModelEntry, ModelList
from pagoda.serving.api.service import Service
from starlette.requests import Request
from starlette.responses import Response


class Models:
    """Both endpoints; every name of the model and every adapter is an entry."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def _entry(self, name: str) -> ModelEntry:
        card, facts, adapter = self._service.card, self._service.client.facts, self._service.adapters.get(name)
        if adapter is not None:
            return ModelEntry(id=name, created=adapter.created, root=adapter.root, parent=adapter.parent, max_model_len=facts.max_model_len)
        return ModelEntry(id=name, created=card.created, root=card.root, max_model_len=facts.max_model_len)

    async def list(self, request: Request) -> Response:
        return _json(ModelList(data=[self._entry(name) for name in (*self._service.card.names, *self._service.adapters)]))

    async def get(self, request: Request) -> Response:
        return _json(self._entry(self._service.check_model(request.path_params["name"])))


def _json(record: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(record), media_type="application/json")
