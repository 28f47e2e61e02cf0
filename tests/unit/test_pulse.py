"""`--sse-keep-alive-interval`: silent streams get comments, streams that speak do not, and nothing else of them changes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence

import pytest
from pagoda.hal.errors import ConfigError, RequestError
from pagoda.serving.api.config import ServerConfig
from pagoda.serving.api.outlet import Outlet
from pagoda.serving.api.pulse import PULSE, pulsed
from pagoda.serving.engine.mailbox import Plain
from pagoda.serving.engine.messages import EngineRequest, RequestDelta
from toy_engine import ToyEngine
from toy_server import toy_server

BODIES = {
    "/v1/completions": {"prompt": "hello"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}]},
    "/v1/messages": {"model": "toy", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 20},
    "/v1/responses": {"input": "hello", "store": False},
    "/inference/v1/generate": {"token_ids": [104, 105], "sampling_params": {"max_tokens": 3}},
}


class SilentEngine(ToyEngine):
    """Says nothing before `heard`."""

    def __init__(self) -> None:
        super().__init__()
        self.heard = asyncio.Event()

    async def generate(self, request: EngineRequest, patience: int = 1, plain: Plain | None = None) -> AsyncIterator[RequestDelta]:
        await self.heard.wait()
        async for delta in super().generate(request, patience, plain):
            yield delta


@pytest.mark.parametrize("path", BODIES)
async def test_a_silent_stream_gets_comments_and_stays_what_it_is(path: str) -> None:
    said = []
    for seconds in (0.0, 0.01):
        engine = SilentEngine()
        async with toy_server(engine, sse_keep_alive_interval=seconds) as toy:
            if not seconds:
                engine.heard.set()
            lines = []
            body = {**BODIES[path], "stream": True}
            async with toy.http.stream("POST", path, json=body, headers={"x-request-id": "same"}) as reply:
                assert reply.status_code == 200, await reply.aread()
                async for line in reply.aiter_lines():
                    lines.append(line)
                    if line == PULSE.decode().strip():
                        engine.heard.set()
            said.append([line for line in lines if line])
    plain, commented = said
    assert PULSE.decode().strip() not in plain and PULSE.decode().strip() in commented
    assert len([line for line in commented if not line.startswith(":")]) == len(plain)


async def test_what_is_refused_in_time_has_its_status() -> None:
    async with toy_server(sse_keep_alive_interval=30) as toy:
        assert (await toy.complete("hello", stream=True, temperature=-1)).status_code == 400
    with pytest.raises(ConfigError, match="sse_keep_alive_interval=-1"):
        ServerConfig(sse_keep_alive_interval=-1)


async def test_what_goes_through_the_outlet_breaks_the_silence_and_the_end_is_passed_on() -> None:
    outlet, spoken, closed = Outlet(), asyncio.Event(), []
    outlet.event = lambda text, token_ids: text.encode()

    async def events() -> AsyncGenerator[bytes, None]:
        try:
            yield b"first"
            await spoken.wait()
            raise RequestError("enough")
        finally:
            closed.append(True)

    async def speak(times: Sequence[int]) -> None:
        for _ in times:
            assert outlet.event("x", [1]) == b"x"
            await asyncio.sleep(0)
        spoken.set()

    got = []
    with pytest.raises(RequestError, match="enough"):
        async for item in pulsed(events(), 30.0, outlet):
            got.append(item)
            speaking = asyncio.ensure_future(speak(range(3)))
    await speaking
    assert (got, closed) == ([b"first"], [True])


async def test_leaving_ends_what_was_waited_for() -> None:
    left = []

    async def events() -> AsyncGenerator[bytes, None]:
        try:
            await asyncio.Event().wait()
            yield b""
        finally:
            left.append(True)

    stream = pulsed(events(), 0.01, None)
    assert await anext(stream) == PULSE
    await stream.aclose()
    assert left == [True]
