"""The real HTTP stack over the toy engine, in the test's own event loop: `async with toy_server() as toy:`."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import uvicorn
from pagoda.serving.api.address import bind
from pagoda.serving.api.app import build_app
from pagoda.serving.api.config import ServerConfig
from pagoda.serving.api.server import UvicornServer, uvicorn_config
from pagoda.serving.api.service import ModelCard, Service
from pagoda.serving.frontend.text import TextFrontend
from patience import eventually
from toy_engine import ToyEngine, toy_text


@dataclass
class Toy:
    engine: ToyEngine
    service: Service
    http: httpx.AsyncClient

    async def chat(self, text: str = "hello", **fields: Any) -> httpx.Response:
        return await self.http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": text}], **fields})

    async def complete(self, prompt: Any = "hello", **fields: Any) -> httpx.Response:
        return await self.http.post("/v1/completions", json={"prompt": prompt, **fields})

    async def stream(self, path: str = "/v1/completions", **body: Any) -> list[dict[str, Any]]:
        response = await self.http.post(path, json={"stream": True, **body})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        return events(response.text)


def events(text: str) -> list[dict[str, Any]]:
    """The records of a finished stream, whose end mark must be there."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


class SwiftServer(UvicornServer):
    """Ends when all has been answered; uvicorn looks every tenth of a second, and hundreds of tests would wait for that."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]) -> None:
        super().__init__(config, on_ready)
        self._ended = asyncio.Event()

    def end(self) -> None:
        self._ended.set()

    async def main_loop(self) -> None:
        await self.on_tick(0)
        await self._ended.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        await eventually(lambda: not self.server_state.connections and not self.server_state.tasks, "for the last connection's end")


@asynccontextmanager
async def toy_server(
    engine: ToyEngine | None = None, *, names: tuple[str, ...] = ("toy", "toy-alias"), text: TextFrontend | None = None, **flags: Any
) -> AsyncIterator[Toy]:
    engine = engine or ToyEngine()
    config = ServerConfig(host="127.0.0.1", port=0, **flags)
    service = Service(engine, text or toy_text(), ModelCard(names, "toy-root"), config)
    sock, ready = bind(config), asyncio.Event()
    server = SwiftServer(uvicorn_config(config, build_app(service)), ready.set)
    task = asyncio.ensure_future(server.serve([sock]))
    try:
        await ready.wait()
        where = f"http://127.0.0.1:{sock.getsockname()[1]}"
        # reading the machine's certificates takes longer than most tests
        async with httpx.AsyncClient(base_url=where, timeout=100, verify=False) as http:
            yield Toy(engine, service, http)
    finally:
        server.end()
        await task
        service.close()
