"""`GET /v1/models` and `GET /v1/models/{id}`; clients of Anthropic's protocol, by its header, get its records."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec
from pagoda.serving.api.anthropic.replies import ModelInfo, ModelPage
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
        entries = [self._entry(name) for name in (*self._service.card.names, *self._service.adapters)]
        if _asks_anthropic(request):
            return _json(ModelPage(data=[_info(entry) for entry in entries], first_id=entries[0].id, last_id=entries[-1].id))
        return _json(ModelList(data=entries))

    async def get(self, request: Request) -> Response:
        entry = self._entry(self._service.check_model(request.path_params["name"]))
        return _json(_info(entry) if _asks_anthropic(request) else entry)


def _asks_anthropic(request: Request) -> bool:
    return "anthropic-version" in request.headers


def _info(entry: ModelEntry) -> ModelInfo:
    created = datetime.fromtimestamp(entry.created, UTC).isoformat().replace("+00:00", "Z")
    longest = entry.max_model_len
    return ModelInfo(id=entry.id, display_name=entry.id, created_at=created, max_input_tokens=longest, max_tokens=longest)


def _json(record: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(record), media_type="application/json")
