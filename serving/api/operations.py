"""Endpoints for those who run the server: health, metrics, load, version, facts, cache reset, and the page's numbers."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
from pagoda.hal.errors import EngineDeadError, RequestError
from pagoda.serving.api.openapi import document
from pagoda.serving.api.service import Service
from pagoda.serving.engine.messages import EngineStats
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

PAGE = Path(__file__).parent / "static" / "index.html"


class Operations:
    """Plain functions of the service's state; none of them takes part in generation."""

    def __init__(self, service: Service, version: str, settings: dict[str, Any]) -> None:
        self._service, self._version, self._settings = service, version, settings
        self._page = PAGE.read_bytes()
        self._page_headers = {**_PAGE_HEADERS, "Content-Security-Policy": _content_policy(self._page)}

    async def page(self, request: Request) -> Response:
        return Response(self._page, media_type="text/html; charset=utf-8", headers=self._page_headers)

    async def health(self, request: Request) -> Response:
        """200 while the engine lives and the server takes requests, else 503."""
        self._service.check_open()
        try:
            await self._service.client.health()
        except EngineDeadError as error:
            self._service.engine_died(str(error))
            raise
        return Response(b"")

    async def live(self, request: Request) -> Response:
        """200 as long as this process answers; a drain or a dead engine is `health`'s to say."""
        return Response(b"")

    async def version(self, request: Request) -> Response:
        return _json({"version": self._version})

    async def load(self, request: Request) -> Response:
        return _json({"server_load": self._service.server_load})

    async def metrics(self, request: Request) -> Response:
        return Response(self._service.metrics.render(await self._stats()), media_type=CONTENT_TYPE_LATEST)

    async def stats(self, request: Request) -> Response:
        facts = self._service.client.facts
        fixed = {
            "model": self._service.card.names[0],
            "max_model_len": facts.max_model_len,
            "device": facts.device,
            "modalities": facts.modalities,
            "sampling_defaults": dict(self._service.card.sampling_defaults),
        }
        stats = asdict(await self._stats())
        alive = self._service.dead is None and not self._service.draining
        return _json({**stats, **fixed, "alive": alive})

    async def server_info(self, request: Request) -> Response:
        return _json({"version": self._version, **self._settings, "engine": asdict(self._service.client.facts)})

    async def openapi(self, request: Request) -> Response:
        """The document of these endpoints."""
        return _json(document(self._version))

    async def reset_prefix_cache(self, request: Request) -> Response:
        self._service.check_open()
        done = await self._service.client.call("reset_prefix_cache")
        if done is False:
            raise RequestError("the prefix cache is in use by running requests; try again when they are done")
        return _json({"reset": True})

    async def _stats(self) -> EngineStats:
        # a dead engine has no numbers, but the server's own metrics are still worth reading
        if self._service.dead is not None:
            return EngineStats()
        try:
            return await self._service.client.stats()
        except EngineDeadError as error:
            self._service.engine_died(str(error))
            return EngineStats()


_PAGE_HEADERS = {
    "Cache-Control": "no-cache",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
}


def _content_policy(page: bytes) -> str:
    """Only the page's own script and style run, and only this server is called."""

    def hashes(tag: bytes) -> str:
        found = re.findall(rb"<%b>(.*?)</%b>" % (tag, tag), page, re.DOTALL)
        return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'" for text in found)

    scripts, styles = hashes(b"script"), hashes(b"style")
    rest = "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'"
    return f"default-src 'none'; script-src {scripts}; style-src {styles}; {rest}"


def _json(content: Any) -> Response:
    return Response(msgspec.json.encode(content, enc_hook=str), media_type="application/json")
