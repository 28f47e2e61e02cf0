"""`/sleep`, `/wake_up`, `/is_sleeping`: what the engine is told, what is refused, and that servers which did not ask for them have none."""

from __future__ import annotations

import pytest
from toy_engine import ToyEngine
from toy_server import toy_server

CALLS = [("POST", "/sleep"), ("POST", "/wake_up"), ("GET", "/is_sleeping")]


class SleepyEngine(ToyEngine):
    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[str, object]] = []

    async def call(self, method: str, **arguments: object) -> object:
        self.told.append((method, next(iter(arguments.values()), None)))
        return method == "is_sleeping"


async def test_the_engine_is_told() -> None:
    async with toy_server(engine := SleepyEngine(), enable_sleep_mode=True) as toy:
        for path in ("/sleep", "/sleep?level=2", "/wake_up", "/wake_up?tags=weights", "/wake_up?tags=kv_cache&tags=weights"):
            assert ((reply := await toy.http.post(path)).status_code, reply.content) == (200, b"")
        assert (await toy.http.get("/is_sleeping")).json() == {"is_sleeping": True}
        text = (await toy.http.get("/metrics")).text
    for operation, count in (("sleep", 2), ("wake", 3)):
        assert f'vllm:sleep_mode_operation_duration_seconds_count{{model_name="toy",operation="{operation}"}} {count}.0' in text
    assert engine.told == [
        ("sleep", 1),
        ("sleep", 2),
        ("wake", None),
        ("wake", ["weights"]),
        ("wake", ["kv", "weights"]),
        ("is_sleeping", None),
    ]


@pytest.mark.parametrize(
    ("path", "param"),
    [("/sleep?level=0", "level"), ("/sleep?level=x", "level"), ("/wake_up?tags=kv", "tags"), ("/wake_up?tags=weights&tags=", "tags")],
)
async def test_wrong_words_are_named(path: str, param: str) -> None:
    async with toy_server(engine := SleepyEngine(), enable_sleep_mode=True) as toy:
        reply = await toy.http.post(path)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)
    assert engine.told == []


@pytest.mark.parametrize(("method", "path"), CALLS)
async def test_nobody_puts_a_server_to_sleep_that_did_not_ask_for_it(method: str, path: str) -> None:
    async with toy_server(engine := SleepyEngine()) as toy:
        reply = await toy.http.request(method, path)
        assert reply.status_code == 404 and "--enable-sleep-mode" in reply.json()["error"]["message"]
    async with toy_server(engine, enable_sleep_mode=True, api_key=("one",)) as toy:
        assert (await toy.http.request(method, path)).status_code == 401
    assert engine.told == []
