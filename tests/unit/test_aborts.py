"""Requests ended by their ids over HTTP: whose they are, what they answer, and what the endpoints refuse."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from pagoda.serving.api.live_names import engine_id, found_among, names_of, new_id
from patience import eventually
from toy_engine import ToyEngine
from toy_server import Toy, toy_server

PATHS = ["/abort_requests", "/inference/v1/abort_requests"]
JSON = {"content-type": "application/json"}
ONE, TWO = {"authorization": "Bearer one"}, {"authorization": "Bearer two"}


async def begun(toy: Toy, name: str, path: str = "/v1/completions", **fields: Any) -> asyncio.Task[Any]:
    count = len(toy.engine.requests)
    body = {"prompt": "abc", "max_tokens": 4000, "ignore_eos": True, "request_id": name, **fields.pop("body", {})}
    task = asyncio.ensure_future(toy.http.post(path, json=body, **fields))
    await eventually(lambda: len(toy.engine.requests) > count)
    return task


async def abort(toy: Toy, path: str, names: list[str] | None, **fields: Any) -> list[str]:
    reply = await toy.http.post(path, json={} if names is None else {"request_ids": names}, **fields)
    assert reply.status_code == 200, reply.text
    told = reply.json()
    assert (told["status"], told["aborted"]) == ("aborted", len(told["request_ids"]))
    return told["request_ids"]


@pytest.mark.parametrize("path", PATHS)
async def test_every_name_of_a_request_ends_it(path: str) -> None:
    async with toy_server(ToyEngine(held=9)) as toy:
        for name in ("mine", "cmpl-mine", ""):
            running, other = await begun(toy, "mine"), await begun(toy, "mine-2")
            name = name or next(one for one in toy.engine.live if names_of(one)[2] == "mine")
            assert await abort(toy, path, ["unknown", name, name]) == [name]
            assert (await running).json()["choices"][0]["finish_reason"] == "abort"
            await eventually(lambda: len(toy.engine.live) == 1)
            assert not other.done()
            assert await abort(toy, path, ["mine-2"]) == ["mine-2"]
            await other


async def test_replies_ids_of_other_protocols_and_all_prompts_of_one() -> None:
    async with toy_server(ToyEngine(held=9)) as toy:
        several = await begun(toy, "many", body={"prompt": ["ab", "cd"]})
        await eventually(lambda: len(toy.engine.live) == 2)
        assert await abort(toy, PATHS[1], ["cmpl-many"]) == ["cmpl-many"]
        assert [one["finish_reason"] for one in (await several).json()["choices"]] == ["abort", "abort"]
        message = {"messages": [{"role": "user", "content": "hello"}], "model": "toy"}
        told = await begun(toy, "", "/v1/messages", body=message, headers={"x-request-id": "given"})
        assert await abort(toy, PATHS[0], ["given", next(names_of(one)[1] for one in toy.engine.live)])
        reply = await told
        assert (reply.status_code, reply.json()["error"]["message"]) == (499, "the request was ended by its id")


async def test_without_ids_all_end_for_trainers_and_none_for_routers() -> None:
    async with toy_server(ToyEngine(held=9)) as toy:
        running = [await begun(toy, name) for name in ("a", "b")]
        refused = await toy.http.post(PATHS[1], json={})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "request_ids")
        assert await abort(toy, PATHS[1], []) == []
        assert len(toy.engine.live) == 2
        assert sorted(await abort(toy, PATHS[0], None)) == ["cmpl-a", "cmpl-b"]
        assert [(await one).json()["choices"][0]["finish_reason"] for one in running] == ["abort"] * 2
        assert (await toy.http.post(PATHS[0], json={"request_ids": "a"})).status_code == 400


HOSTILE: list[Any] = [
    5, "all", {"a": 1}, [1], ["a", None], [["a"]], [{}], [True], ["x" * 1025], "a" * 100_000, [b"\xff".hex(), 2**70],
]  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
async def test_hostile_bodies_end_nothing_and_say_what_is_wrong(path: str) -> None:
    async with toy_server(ToyEngine(delay=0.02)) as toy:
        running = await begun(toy, "mine")
        for wrong in HOSTILE:
            reply = await toy.http.post(path, content=json.dumps({"request_ids": wrong}), headers=JSON)
            error = reply.json()["error"]
            assert reply.status_code == 400 and error["param"].startswith("request_ids") and "request_ids" in error["message"], wrong
        for body in (
            b"",
            b"[]",
            b"null",
            b"7",
            b'{"request_ids": ["a"',
            b'{"request_ids": ["\xff"]}',
            b'{"request_ids": ' + b"[" * 100_000,
        ):
            reply = await toy.http.post(path, content=body, headers=JSON)
            assert reply.status_code == 400 and reply.json()["error"]["message"], body[:40]
        assert (await toy.http.post(path, content=b"{}", headers={"content-type": "text/plain"})).status_code == 415
        assert not running.done() and len(toy.engine.live) == 1
        many = [f"cmpl-mine-{place}" for place in range(20_000)] + ["", "mine\x00", "%s", "../mine", "cmpl-"]
        assert await abort(toy, path, many) == []
        assert len(toy.engine.live) == 1
        assert await abort(toy, path, [*many, "mine", "mine"]) == ["mine"]
        await running


async def test_a_key_ends_its_own_requests_alone_and_is_never_above_its_limits() -> None:
    async with toy_server(ToyEngine(held=9), api_key=("one", "two"), key_max_requests=1) as toy:
        running = await begun(toy, "mine", headers=ONE)
        assert (await toy.http.post("/v1/completions", json={"prompt": "a"}, headers=ONE)).status_code == 429
        assert (await toy.http.post(PATHS[0], json={})).status_code == 401
        for names in (["mine"], None):
            assert await abort(toy, PATHS[0], names, headers=TWO) == []
        assert await abort(toy, PATHS[0], ["mine"], headers=ONE) == ["mine"]
        assert (await running).json()["choices"][0]["finish_reason"] == "abort"


def test_names() -> None:
    made = engine_id(new_id("chatcmpl", "a-0123456789ab"))
    assert names_of(made)[1:] == ("chatcmpl-a-0123456789ab", "a-0123456789ab")
    piece = engine_id(new_id("trsc", "x") + "-0")
    assert names_of(piece) == (piece, "trsc-x", "x")
    assert found_among([made, piece], ["x", "0123456789ab", "a", made]) == {"x": [piece], made: [made]}
    assert found_among([made, piece], None) == {"chatcmpl-a-0123456789ab": [made], "trsc-x": [piece]}
