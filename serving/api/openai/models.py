"""`GET /v1/models` and `GET /v1/models/{id}`."""

from __future__ import annotations

import msgspec
from pagoda.serving.api.openai.replies import ModelEntry, ModelList
from pagoda.serving.api.service import Service
from starlette.requests import Request
from starlette.responses import Response


class Models:
    """Both endpoints; every name of the model is an entry."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def _entry(self, name: str) -> ModelEntry:
        card, facts = self._service.card, self._service.client.facts
        return ModelEntry(id=name, created=card.created, root=card.root, max_model_len=facts.max_model_len)

    async def list(self, request: Request) -> Response:
        return _json(ModelList(data=[self._entry(name) for name in self._service.card.names]))

    async def get(self, request: Request) -> Response:
        return _json(self._entry(self._service.check_model(request.path_params["name"])))


def _json(record: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(record), media_type="application/json")
