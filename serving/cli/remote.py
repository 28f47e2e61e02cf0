"""A running server seen from the command line: its models, and streams of completions and chats."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
from pagoda.hal.errors import PagodaError


class Remote:
    """An OpenAI-compatible server. Every failure is a `PagodaError` that names the address."""

    def __init__(self, client: httpx.AsyncClient, url: str) -> None:
        self._client = client
        self.url = url

    async def models(self) -> list[dict[str, Any]]:
        """Cards of the served models, the default one first."""
        with _named(self.url):
            response = await self._client.get("/v1/models")
            await _check(response)
            return list(response.json()["data"])

    async def engine_facts(self) -> dict[str, Any]:
        """What the engine said of itself when it had started; a server of another make has none."""
        with _named(self.url):
            response = await self._client.get("/server_info")
            return dict(response.json()["engine"]) if response.is_success else {}

    async def stream(self, path: str, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """Events of one streamed request."""
        with _named(self.url):
            async with self._client.stream("POST", path, json={**body, "stream": True}) as response:
                await _check(response)
                async for line in lines_of(response):
                    if line.startswith(b"data: ") and line != b"data: [DONE]":
                        yield _event(line[6:])


@asynccontextmanager
async def connect(url: str, api_key: str | None = None, connections: int = 100) -> AsyncIterator[Remote]:
    """A server by its address, with or without `/v1` at the end."""
    url = (url if "://" in url else f"http://{url}").rstrip("/").removesuffix("/v1")
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
    timeout = httpx.Timeout(None, connect=10)
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=timeout, limits=limits) as client:
        yield Remote(client, url)


class _named:
    def __init__(self, url: str) -> None:
        self._url = url

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, httpx.HTTPError):
            raise PagodaError(f"{self._url} does not answer: {error or type(error).__name__}; is the server running there?") from error
        if isinstance(error, httpx.InvalidURL):
            raise PagodaError(f"{self._url} is no address: {error}") from error


async def _check(response: httpx.Response) -> None:
    if response.is_success:
        return
    text = (await response.aread()).decode(errors="replace")
    try:
        message = json.loads(text)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = text[:200] or response.reason_phrase
    raise PagodaError(f"the server refused with {response.status_code}: {message}")


async def lines_of(response: httpx.Response) -> AsyncIterator[bytes]:
    """A stream's lines, split at line feeds alone: httpx's own lines end at every separator of Unicode, and a model may write those."""
    left = b""
    async for chunk in response.aiter_bytes():
        *lines, left = (left + chunk).split(b"\n")
        for line in lines:
            yield line.rstrip(b"\r")
    if left:
        yield left


def _event(text: bytes) -> dict[str, Any]:
    event = json.loads(text)
    if "error" in event:
        raise PagodaError(f"the server failed the request: {event['error'].get('message', event['error'])}")
    return dict(event)
