"""Limits of the server: a client's share, a request's time, keys kept out of the command line, and the three kinds of probe."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from pagoda.hal.errors import ConfigError
from pagoda.serving.api.config import ServerConfig
from pagoda.serving.api.errors import RateLimitedError
from pagoda.serving.api.key_limits import KeyLimits
from pagoda.serving.api.keys import keys_of
from patience import eventually
from toy_engine import ToyEngine
from toy_server import toy_server


def test_requests_a_minute_come_back_as_time_passes() -> None:
    now = 0.0
    limits = KeyLimits(None, 6, clock=lambda: now)
    for _ in range(6):
        limits.enter("a")
    with pytest.raises(RateLimitedError, match="6 requests a minute") as refused:
        limits.enter("a")
    assert refused.value.retry_after == 10
    limits.enter("b")
    now = 10.0
    limits.enter("a")
    with pytest.raises(RateLimitedError):
        limits.enter("a")
    now = 1000.0
    for _ in range(6):
        limits.enter("a")
    with pytest.raises(RateLimitedError):
        limits.enter("a")


def test_requests_at_once_are_counted_until_they_end() -> None:
    limits = KeyLimits(2, None)
    limits.enter("a")
    limits.enter("a")
    with pytest.raises(RateLimitedError, match="under way"):
        limits.enter("a")
    limits.enter("b")
    limits.leave("a")
    limits.enter("a")


async def test_a_key_above_its_share_gets_429_and_others_do_not() -> None:
    async with toy_server(ToyEngine(held=0), api_key=("one", "two"), key_max_requests=1) as toy:

        async def ask(key: str) -> tuple[int, str | None]:
            body = {"prompt": "ab", "max_tokens": 1}
            reply = await toy.http.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})
            return reply.status_code, reply.headers.get("retry-after")

        tasks = [asyncio.ensure_future(ask(key)) for key in ("one", "one", "two")]
        await eventually(lambda: len(toy.engine.live) == 2 and any(task.done() for task in tasks))
        toy.engine.held = None
        answers = await asyncio.gather(*tasks)
        assert sorted(answers[:2]) == [(200, None), (429, "1")]
        assert answers[2] == (200, None)
        assert (await ask("one")) == (200, None)
        assert (await toy.http.get("/health")).status_code == 200


async def test_a_request_above_its_time_ends_in_the_engine_too() -> None:
    async with toy_server(ToyEngine(held=3), request_timeout=0.5) as toy:
        whole = await toy.complete("ab", max_tokens=1000, ignore_eos=True)
        assert (whole.status_code, whole.json()["error"]["code"]) == (504, "request_timeout")
        assert (toy.engine.live, toy.service.load) == ({}, 0)
        while (await toy.complete("ab", max_tokens=1)).status_code != 200:  # which takes no half second, unless the machine stands still
            await asyncio.sleep(0)


async def test_probes() -> None:
    async with toy_server(api_key=("k",)) as toy:
        assert [(await toy.http.get(path)).status_code for path in ("/live", "/ready", "/health")] == [200, 200, 200]
        toy.service.draining = True
        assert [(await toy.http.get(path)).status_code for path in ("/live", "/ready", "/health")] == [200, 503, 503]
        toy.service.draining = False


def test_keys_from_a_file_and_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys"
    file.write_text("one\n\n two \n")
    monkeypatch.setenv("TOY_KEYS", "three, four")
    assert keys_of(ServerConfig(api_key=("zero",), api_key_file=str(file), api_key_env="TOY_KEYS")) == (
        "zero",
        "one",
        "two",
        "three",
        "four",
    )
    with pytest.raises(ConfigError, match="No such file"):
        keys_of(ServerConfig(api_key_file=str(tmp_path / "absent")))
    file.write_text("\n")
    with pytest.raises(ConfigError, match="holds no key"):
        keys_of(ServerConfig(api_key_file=str(file)))
    with pytest.raises(ConfigError, match="not set"):
        keys_of(ServerConfig(api_key_env="TOY_ABSENT"))
