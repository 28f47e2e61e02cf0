"""Adapters at the server: the names that requests may use, and `POST /v1/load_lora_adapter`, `/v1/unload_lora_adapter`."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
from pagoda.hal.errors import ConfigError, RequestError
from pagoda.serving.api.body import BodyReader
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

if TYPE_CHECKING:
    from pagoda.serving.api.service import Service


@dataclass(frozen=True)
class AdapterCard:
    """A loaded adapter. `root`: its folder; `parent`: the model that it changes."""

    name: str
    root: str
    parent: str
    created: int = field(default_factory=lambda: int(time.time()))


def cards_of(loaded: Iterable[tuple[str, str, str | None]], names: tuple[str, ...]) -> dict[str, AdapterCard]:
    """Of the adapters loaded at start. Raises `ConfigError` where one has the name of the model."""
    cards = {name: AdapterCard(name, path, parent or names[0]) for name, path, parent in loaded}
    taken = sorted(cards.keys() & set(names))
    if taken:
        raise ConfigError(f"lora_modules names {', '.join(taken)}, which is the model's own name; give adapters other names")
    return cards


class LoadRequest(msgspec.Struct, kw_only=True):
    """`load_inplace` may replace an adapter of the same name."""

    lora_name: str
    lora_path: str
    load_inplace: bool | None = False


class UnloadRequest(msgspec.Struct, kw_only=True):
    """`lora_int_id` is accepted and has no effect: names are unique here."""

    lora_name: str
    lora_int_id: int | None = None


class AdapterEndpoints:
    """Both endpoints; they answer with a sentence, as `vllm serve` does."""

    def __init__(self, service: Service, bodies: BodyReader) -> None:
        self._service, self._bodies = service, bodies

    async def load(self, request: Request) -> Response:
        self._service.check_open()
        body = await self._bodies.read(request, LoadRequest)
        if not body.lora_name or body.lora_name in self._service.card.names:
            raise RequestError(f"lora_name={body.lora_name!r} is empty or the model's own name; choose another", param="lora_name")
        await self._service.client.call("load_adapter", name=body.lora_name, path=body.lora_path, in_place=bool(body.load_inplace))
        self._service.adapters[body.lora_name] = AdapterCard(body.lora_name, body.lora_path, self._service.card.names[0])
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def unload(self, request: Request) -> Response:
        self._service.check_open()
        body = await self._bodies.read(request, UnloadRequest)
        await self._service.client.call("unload_adapter", name=body.lora_name)
        self._service.adapters.pop(body.lora_name, None)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")
