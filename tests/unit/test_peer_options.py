"""Options that people bring from `vllm serve`: limits of logprobs, middleware, a line for each request, no document, parsers from files."""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest
from pagoda.hal.errors import ConfigError
from pagoda.serving.api.config import ServerConfig
from pagoda.serving.api.user_middleware import user_middleware
from pagoda.serving.engine.config import EngineConfig
from pagoda.serving.engine.params import MAX_LOGPROBS
from pagoda.serving.engine.spec.config import Ngram
from pagoda.serving.frontend.parsers.choose import choose
from pagoda.serving.frontend.parsers.events import CallArguments, CallName, Context
from toy_engine import BOS, ToyEngine
from toy_server import events, toy_server

MIDDLEWARE = """
class Stamp:
    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send):
        async def stamped(message):
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-stamp", b"outer")]
            if message["type"] == "http.response.body":
                message["body"] = message["body"].replace(b"hello", b"HELLO")
            await send(message)

        await self.app(scope, receive, stamped)


async def limit(request, call_next):
    response = await call_next(request)
    response.headers["x-limit"] = "inner"
    return response


NOTHING = 3
"""
PLUGIN = """
from pagoda.serving.frontend.parsers.events import Family
from pagoda.serving.frontend.parsers.flow import scripted
from pagoda.serving.frontend.parsers.hermes import HERMES
from pagoda.serving.frontend.parsers.json_calls import marked
OURS = Family("tools", ("ours",), scripted(marked(("CALL",))))
"""


async def test_more_logprobs_than_the_server_gives_are_refused_in_the_requests_words() -> None:
    async with toy_server(max_logprobs=3) as toy:
        assert (await toy.chat(logprobs=True, top_logprobs=3)).status_code == 200
        for fields, param in (({"logprobs": 4}, "logprobs"), ({"prompt_logprobs": 4}, "prompt_logprobs")):
            error = (await toy.complete(**fields)).json()["error"]
            assert error["param"] == param and "--max-logprobs" in error["message"]
        error = (await toy.chat(logprobs=True, top_logprobs=4)).json()["error"]
        assert (error["param"], error["message"].split()[0]) == ("top_logprobs", "top_logprobs=4")
    assert ServerConfig(max_logprobs=-1).max_logprobs == MAX_LOGPROBS
    with pytest.raises(ConfigError, match="max_logprobs=65 must be from 0 to 64"):
        ServerConfig(max_logprobs=65)


async def test_middlewares_see_all_that_is_sent_the_last_one_outermost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "peer_middleware.py").write_text(MIDDLEWARE)
    async with toy_server(middleware=("peer_middleware.limit", "peer_middleware.Stamp")) as toy:
        for path in ("/v1/completions", "/v1/chat/completions"):
            body = {"prompt": "say hello"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "say hello"}]}
            reply = await toy.http.post(path, json={**body, "stream": True, "max_tokens": 40, "stop": ["!"]})
            assert (reply.headers["x-stamp"], reply.headers["x-limit"]) == ("outer", "inner")
            assert len(events(reply.text)) > 5
        whole = (await toy.complete("say hello")).text
        assert "HELLO" in whole and "hello" not in whole
    for name, why in (("NOTHING", "must be an ASGI class"), ("Gone", "cannot be imported")):
        path = f"peer_middleware.{name}"
        with pytest.raises(ConfigError, match=f"--middleware {path} .*{why}"):
            user_middleware((path,))


async def test_requests_are_logged_as_far_as_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    async with toy_server(enable_log_requests=True, max_log_len=3) as toy:
        with caplog.at_level(logging.INFO, "pagoda.api"):
            await toy.complete("hello", max_tokens=2, request_id="mine")
        [line] = [one.message for one in caplog.records if "received request" in one.message]
        assert line.startswith("received request cmpl-mine-") and f"prompt_token_ids: {[BOS, *b'he']}" in line and "max_tokens=2" in line
    async with toy_server() as toy:
        caplog.clear()
        with caplog.at_level(logging.INFO, "pagoda.api"):
            await toy.complete("hello")
        assert not [one for one in caplog.records if "received request" in one.message]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("parts", [False, True])
async def test_answers_are_logged_whole_and_in_parts(caplog: pytest.LogCaptureFixture, stream: bool, parts: bool) -> None:
    async with toy_server(enable_log_outputs=True, enable_log_deltas=parts, max_log_len=4) as toy:
        with caplog.at_level(logging.INFO, "pagoda.api"):
            told = await toy.complete("hello", max_tokens=5, n=2, request_id="mine", stream=stream)
    assert told.status_code == 200
    lines = [one.message for one in caplog.records if "of request cmpl-mine-" in one.message]
    whole = [line for line in lines if line.startswith("answer")]
    assert ["sequence 0" in whole[0], "sequence 1" in whole[1], len(whole)] == [True, True, 2]
    assert f"'hell', token_ids: {[BOS, *b'hel']}, finish_reason: length" in whole[0]
    assert (len(lines) > len(whole)) == (stream and parts)


async def test_an_answer_that_its_client_left_is_logged_too(caplog: pytest.LogCaptureFixture) -> None:
    async with toy_server(ToyEngine(delay=0.01), enable_log_outputs=True, enable_log_deltas=False) as toy:
        with caplog.at_level(logging.INFO, "pagoda.api"):
            async with toy.http.stream("POST", "/v1/completions", json={"prompt": "hello", "stream": True, "max_tokens": 4000}) as reply:
                async for line in reply.aiter_lines():
                    if "data: {" in line:
                        break
            while toy.service.load:
                await asyncio.sleep(0.01)
        [line] = [one.message for one in caplog.records if one.message.startswith("answer")]
        assert line.endswith("finish_reason: abort")


async def test_the_document_may_be_left_out() -> None:
    async with toy_server(disable_fastapi_docs=True) as toy:
        assert (await toy.http.get("/openapi.json")).status_code == 404
    async with toy_server() as toy:
        assert "paths" in json.loads((await toy.http.get("/openapi.json")).text)


def test_a_file_brings_parsers(tmp_path: Path) -> None:
    file = tmp_path / "plugin.py"
    file.write_text(PLUGIN)
    family = choose("tools", "ours", "", str(file))
    assert family is not None
    parser = family.make(Context({"t": {}}))
    assert [*parser.feed('CALL{"name": "t", "arguments": {}}'), *parser.finish()] == [CallName(0, "t"), CallArguments(0, "{}")]
    assert choose("tools", "hermes", "", str(file)) == choose("tools", "hermes", "")
    for kind, text, why in (
        ("reasoning", PLUGIN, "--reasoning-parser-plugin .* holds no Family of kind 'reasoning'"),
        ("tools", "1 / 0", "--tool-parser-plugin .* failed to load: ZeroDivisionError"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=why):
            choose(kind, "ours", "", str(file))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="failed to load: FileNotFoundError"):
        choose("tools", "ours", "", str(tmp_path / "gone.py"))
    with pytest.raises(ConfigError, match="is no Python file"):
        choose("tools", "ours", "", str(tmp_path / "gone.txt"))


def test_speculation_in_two_words() -> None:
    assert EngineConfig(spec_method="ngram", spec_tokens=3).speculation == Ngram(3)
    both = EngineConfig(speculative_config={"method": "ngram", "prompt_lookup_max": 2}, spec_tokens=4)
    assert replace(both, seed=1).speculation == Ngram(4, 2, 2)
    for given, why in (
        ({"spec_tokens": 3}, "method None"),
        ({"spec_method": "eagle"}, "method 'eagle'"),
        ({"spec_method": "mtp"}, "needs"),
    ):
        with pytest.raises(ConfigError, match=why):
            EngineConfig(**given)
