"""The short way of a stream's tokens says what the long way says, and gives way to whatever the connection cannot take."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from pagoda.serving.api.address import bind
from pagoda.serving.api.config import ServerConfig
from pagoda.serving.api.connection import Connection
from pagoda.serving.api.outlet import MARK, Outlet, around
from pagoda.serving.api.stream_events import event
from pagoda.serving.engine.mailbox import Plain
from pagoda.serving.engine.messages import EngineRequest, RequestDelta
from patience import eventually
from scripted import text_side
from toy_engine import ToyEngine
from toy_server import Toy, events, toy_server

TEXT = 'héllo "wörld"\n日本 👍🏽 </b> \\ end'


class Watched(ToyEngine):
    """Counts what went the short way, and what was refused there; without `short` offers nothing."""

    def __init__(self, short: bool = True, **more: Any) -> None:
        super().__init__(**more)
        self.short = short
        self.taken = self.refused = 0

    async def generate(self, request: EngineRequest, patience: int = 1, plain: Plain | None = None) -> AsyncIterator[RequestDelta]:
        def offered(token_ids: Sequence[int] | RequestDelta) -> bool:
            assert plain is not None
            took = plain(token_ids)
            self.taken += took
            self.refused += not took
            return took

        async for delta in super().generate(request, patience, offered if self.short and plain is not None else None):
            yield delta


def said(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without what differs from request to request."""
    return [{name: value for name, value in record.items() if name not in ("id", "created")} for record in records]


async def asked(path: str, short: bool, fields: dict[str, Any], burst: int = 1) -> tuple[list[dict[str, Any]], Watched]:
    engine = Watched(short, burst=burst)
    prompt = {"prompt": TEXT} if path == "/v1/completions" else {"messages": [{"role": "user", "content": TEXT}]}
    async with toy_server(engine, text=text_side() if fields.pop("parsed", False) else None) as toy:
        return said(await toy.stream(path, **prompt, max_tokens=40, **fields)), engine


USAGE = {"stream_options": {"include_usage": True}}
ALL_USAGE = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
SHORT = [
    {},
    USAGE,
    ALL_USAGE,
    {"return_token_ids": True},
    {"ignore_eos": True, "skip_special_tokens": False},
    {"stop": "zz"},
    {"stop": ["zz", "héx"]},
]


@pytest.mark.parametrize("fields", SHORT, ids=str)
@pytest.mark.parametrize("burst", [1, 3])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_both_ways_say_the_same(path: str, burst: int, fields: dict[str, Any]) -> None:
    short, engine = await asked(path, True, dict(fields), burst)
    long, _ = await asked(path, False, dict(fields), burst)
    assert short == long
    assert engine.taken >= 8 and not engine.refused


@pytest.mark.parametrize("fields", [{"n": 3}, {"n": 2, **ALL_USAGE}, {"n": 2, "return_token_ids": True}], ids=str)
@pytest.mark.parametrize("burst", [1, 3])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_several_sequences_go_it_together(path: str, burst: int, fields: dict[str, Any]) -> None:
    short, engine = await asked(path, True, dict(fields), burst)
    long, _ = await asked(path, False, dict(fields), burst)
    assert short == long
    assert engine.taken >= 8 and engine.refused <= 1


@pytest.mark.parametrize("stop", ["lo", "\n日", "👍🏽 <", "d"])
@pytest.mark.parametrize("include", [False, True])
async def test_a_stop_string_ends_the_short_way(stop: str, include: bool) -> None:
    fields = {"stop": stop, "include_stop_str_in_output": include, **USAGE}
    short, engine = await asked("/v1/chat/completions", True, dict(fields))
    long, _ = await asked("/v1/chat/completions", False, dict(fields))
    assert short == long and engine.taken and engine.refused == 1 and not engine.live
    assert [one["choices"][0]["stop_reason"] for one in short if one["choices"] and one["choices"][0]["finish_reason"]] == [stop]


@pytest.mark.parametrize("parsed", [False, True])
@pytest.mark.parametrize("stop", [None, "end"])
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
async def test_other_protocols_go_it_too(path: str, stop: str | None, parsed: bool) -> None:
    async def told(short: bool) -> tuple[str, Watched]:
        engine = Watched(short)
        body: dict[str, Any] = {"model": "toy", "stream": True}
        if path == "/v1/messages":
            body |= {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 40, "stop_sequences": [stop] if stop else []}
        else:
            body |= {"input": TEXT, "max_output_tokens": 40, "store": False} | ({"stop": stop} if stop else {})
        async with toy_server(engine, text=text_side() if parsed else None) as toy:
            reply = await toy.http.post(path, json=body)
            assert reply.status_code == 200, reply.text
        return re.sub(r"[0-9a-f]{24,}|(?<=_at\":)\d+", "X", reply.text), engine

    (short, engine), (long, _) = await told(True), await told(False)
    assert short == long and engine.taken >= 8


@pytest.mark.parametrize("fields", [{"n": 2, "stop": "zz"}, {"logprobs": 1}], ids=str)
async def test_what_needs_more_than_text_takes_the_long_way(fields: dict[str, Any]) -> None:
    short, engine = await asked("/v1/completions", True, dict(fields))
    long, _ = await asked("/v1/completions", False, dict(fields))
    assert short == long and not engine.taken


async def test_a_parser_reads_the_same_on_both_ways() -> None:
    short, engine = await asked("/v1/chat/completions", True, {"parsed": True})
    long, _ = await asked("/v1/chat/completions", False, {"parsed": True})
    assert short == long and engine.taken


def bind_narrow(config: ServerConfig) -> socket.socket:
    sock = bind(config)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)  # accepted connections inherit it
    return sock


HIGH_WATER = 64 << 10
"""What asyncio lets wait for a client before it says so."""


def watch_buffers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes that wait for a client after each write."""
    sizes: list[int] = []
    real = Connection.opened

    def opened(self: Connection, transport: Any) -> None:
        write = transport.write

        def watched(data: bytes) -> None:
            write(data)
            sizes.append(transport.get_write_buffer_size())

        transport.write = watched
        real(self, transport)

    monkeypatch.setattr(Connection, "opened", opened)
    return sizes


async def test_a_reader_that_pauses_gets_all_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toy_server.bind", bind_narrow)
    sizes = watch_buffers(monkeypatch)
    engine = Watched()
    async with toy_server(engine) as toy:
        body = json.dumps({"prompt": list(b"ab" * 900), "max_tokens": 2200, "ignore_eos": True, "stream": True})
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        loop = asyncio.get_running_loop()
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            await loop.sock_connect(client, (toy.http.base_url.host, toy.http.base_url.port))
            await loop.sock_sendall(client, f"{head}Connection: close\r\n\r\n{body}".encode())
            await eventually(lambda: engine.refused)
            parts = []
            while part := await loop.sock_recv(client, 1 << 16):
                parts.append(part)
    assert engine.taken > engine.refused
    texts = [choice["text"] for record in events(unchunked(b"".join(parts))) for choice in record["choices"]]
    assert "".join(texts) == "ab" * 1100
    assert HIGH_WATER < max(sizes) < HIGH_WATER + 4096, "no more waits for it than is let, whatever the answer's length"


def unchunked(answer: bytes) -> str:
    head, _, rest = answer.partition(b"\r\n\r\n")
    assert head.lower().count(b"transfer-encoding: chunked") == 1
    out = []
    while True:
        size, _, rest = rest.partition(b"\r\n")
        if not int(size, 16):
            return b"".join(out).decode()
        out.append(rest[: int(size, 16)])
        assert rest[int(size, 16) :].startswith(b"\r\n")
        rest = rest[int(size, 16) + 2 :]


async def test_one_connection_serves_streams_and_others_in_turn() -> None:
    async with toy_server(Watched()) as toy:
        for _ in range(3):
            assert await answer(toy) == "hello"
            assert (await toy.complete("hello", max_tokens=6)).json()["choices"][0]["text"] == "hello"


async def answer(toy: Toy) -> str:
    return "".join(record["choices"][0]["text"] for record in await toy.stream(prompt="hello", max_tokens=6))


async def test_a_client_that_goes_ends_its_request() -> None:
    engine = Watched(delay=0.005)
    async with toy_server(engine) as toy:
        async with toy.http.stream("POST", "/v1/completions", json={"prompt": "abc" * 300, "stream": True}) as response:
            async for _ in response.aiter_bytes():
                if engine.taken:
                    break
        await eventually(lambda: engine.aborted)
        assert not engine.live


def test_an_outlet_that_nobody_opened_takes_nothing() -> None:
    assert not Outlet().connection.writable and not Connection().writable


def test_events_around_a_text_are_those_of_the_encoder() -> None:
    counted: list[int] = []
    marked = around(event({"id": MARK, "text": MARK, "after": None}), counted.append)  # type: ignore[arg-type]
    assert marked(TEXT, [1, 2]) == event({"id": MARK, "text": TEXT, "after": None})  # type: ignore[arg-type]
    assert (marked("", [3]), counted) == (b"", [2, 1])
