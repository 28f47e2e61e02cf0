"""Batch files through the server's application over the toy engine."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from pagoda.hal.errors import ConfigError
from pagoda.serving.api import batch
from pagoda.serving.api.app import build_app
from pagoda.serving.api.batch import Outcome, run_batch
from pagoda.serving.api.config import ServerConfig
from pagoda.serving.api.service import ModelCard, Service
from pagoda.serving.cli.run_batch import run
from patience import eventually
from toy_engine import ToyEngine, toy_text


def line(name: str, url: str = "/v1/completions", **body: Any) -> str:
    return json.dumps({"custom_id": name, "method": "POST", "url": url, "body": body}) + "\n"


async def answers(lines: list[str], engine: ToyEngine | None = None) -> tuple[list[dict[str, Any]], Outcome, list[int]]:
    service = Service(engine or ToyEngine(), toy_text(), ModelCard(("toy",), "toy"), ServerConfig())
    out: list[str] = []
    seen: list[int] = []
    try:
        outcome = await run_batch(build_app(service), lines, out.append, lambda outcome: seen.append(outcome.done))
    finally:
        service.close()
    assert all(text.endswith("\n") and text.count("\n") == 1 for text in out)
    return [json.loads(text) for text in out], outcome, seen


async def test_replies_are_those_of_the_endpoints_in_the_lines_order() -> None:
    long = "x" * 200
    lines = [
        line("long", prompt=long),
        "\n",
        line("chat", "/v1/chat/completions", messages=[{"role": "user", "content": "hi\nthere"}], model="toy"),
        line("short", prompt="ab"),
    ]
    replies, outcome, seen = await answers(lines, ToyEngine(delay=0.001))
    assert [reply["custom_id"] for reply in replies] == ["long", "chat", "short"]
    assert [reply["response"]["status_code"] for reply in replies] == [200] * 3
    assert replies[0]["response"]["body"]["choices"][0]["text"] == long[:15]
    assert replies[1]["response"]["body"]["object"] == "chat.completion"
    assert replies[2]["response"]["body"]["choices"][0]["text"] == "ab"
    assert all(reply["error"] is None and reply["id"].startswith("batch_req_") and reply["response"]["request_id"] for reply in replies)
    assert len({reply["id"] for reply in replies}) == 3
    assert (outcome.done, outcome.failed, seen) == (3, 0, [1, 2, 3])


@pytest.mark.parametrize(
    ("wrong", "name", "code", "says"),
    [
        ("{not json}\n", None, "invalid_line", "no request of the batch format"),
        ('{"custom_id": "a", "url": "/v1/completions"}\n', "a", "invalid_line", "`body`"),
        ('{"custom_id": "a", "method": "GET", "url": "/v1/completions", "body": {}}\n', "a", "invalid_line", "GET"),
        (line("a", "/v1/images"), "a", "invalid_url", "/v1/chat/completions"),
        (line("a", prompt="x", stream=True), "a", "invalid_body", "stream=true"),
    ],
)
async def test_a_wrong_line_is_told_and_harms_no_other(wrong: str, name: str | None, code: str, says: str) -> None:
    replies, outcome, _ = await answers([line("one", prompt="a"), wrong, line("two", prompt="b")])
    assert [reply["custom_id"] for reply in replies] == ["one", name, "two"]
    assert replies[1]["response"] is None and replies[1]["error"]["code"] == code and says in replies[1]["error"]["message"]
    assert replies[2]["response"]["body"]["choices"][0]["text"] == "b"
    assert (outcome.done, outcome.failed) == (3, 1)


async def test_a_refused_request_has_its_status_and_error() -> None:
    lines = [line("hot", prompt="a", temperature=-1), line("other", prompt="a", model="other"), line("fine", prompt="a")]
    hot, other, fine = (await answers(lines))[0]
    assert (hot["response"]["status_code"], hot["error"]["param"]) == (400, "temperature")
    assert hot["response"]["body"]["error"] == hot["error"]
    assert (other["response"]["status_code"], other["error"]["code"]) == (404, "model_not_found")
    assert fine["error"] is None


async def test_only_so_many_lines_are_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "AT_ONCE", 3)
    engine = ToyEngine(held=1)
    running = asyncio.ensure_future(answers([line(str(place), prompt="abcd") for place in range(20)], engine))
    await eventually(lambda: engine.generated == 3)
    engine.held = None
    replies, _, _ = await running
    assert [reply["custom_id"] for reply in replies] == [str(place) for place in range(20)]
    assert engine.most_live == 3


def test_files_are_asked_for_before_anything_loads(tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match="--input-file"):
        run(["-o", "out.jsonl"])
    with pytest.raises(ConfigError, match="no such file"):
        run(["-i", str(tmp_path / "absent.jsonl"), "-o", "out.jsonl"])
