"""Files of requests in OpenAI's batch format: each line goes through the server's own application, and its reply becomes a line."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterable
from typing import Any, Literal

import httpx
import msgspec
from starlette.applications import Starlette

URLS = (
    "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"
)  # fmt: skip
AT_ONCE = 512
"""Lines under way; the engine runs of them what fits."""


class BatchLine(msgspec.Struct, kw_only=True):
    """A request."""

    custom_id: str
    method: Literal["POST"] = "POST"
    url: str
    body: dict[str, Any]


class BatchResponse(msgspec.Struct, kw_only=True):
    """What the endpoint answered."""

    status_code: int
    request_id: str
    body: Any


class BatchReply(msgspec.Struct, kw_only=True):
    """A line of the output. `error` is set, too, where the endpoint answered with one."""

    id: str
    custom_id: str | None
    response: BatchResponse | None
    error: dict[str, Any] | None


class Outcome(msgspec.Struct):
    """Of a whole file."""

    done: int = 0
    failed: int = 0


async def run_batch(app: Starlette, lines: Iterable[str], write: Callable[[str], None], told: Callable[[Outcome], None]) -> Outcome:
    """Answer every line that is not blank; `write` gets the answers in the lines' order, each as soon as those before it are there.

    `told` hears of every line that is done. A line that fails does not end the others.
    """
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://batch", timeout=None) as http:
        return await _Run(http, write, told).all(lines)


class _Run:
    def __init__(self, http: httpx.AsyncClient, write: Callable[[str], None], told: Callable[[Outcome], None]) -> None:
        self._http, self._write, self._told = http, write, told
        self._room = asyncio.Semaphore(AT_ONCE)
        self._ready: dict[int, BatchReply] = {}
        self._next = 0
        self._outcome = Outcome()

    async def all(self, lines: Iterable[str]) -> Outcome:
        async with asyncio.TaskGroup() as group:
            for place, line in enumerate(line for line in lines if line.strip()):
                await self._room.acquire()
                group.create_task(self._one(place, line))
        return self._outcome

    async def _one(self, place: int, line: str) -> None:
        reply = await self._answer(line)
        self._room.release()
        self._outcome.done += 1
        self._outcome.failed += reply.error is not None
        self._ready[place] = reply
        while (ready := self._ready.pop(self._next, None)) is not None:
            self._write(msgspec.json.encode(ready).decode() + "\n")
            self._next += 1
        self._told(self._outcome)

    async def _answer(self, line: str) -> BatchReply:
        try:
            request = msgspec.json.decode(line, type=BatchLine)
        except (msgspec.DecodeError, RecursionError) as error:
            return _refused(_custom_id(line), "invalid_line", f"the line is no request of the batch format: {error}")
        if request.url not in URLS:
            return _refused(request.custom_id, "invalid_url", f"url={request.url!r} is not served in batches; there are {', '.join(URLS)}")
        if request.body.get("stream"):
            return _refused(request.custom_id, "invalid_body", "stream=true has no meaning in a batch; leave it out")
        return await self._send(request)

    async def _send(self, request: BatchLine) -> BatchReply:
        content, headers = msgspec.json.encode(request.body), {"Content-Type": "application/json"}
        answer = await self._http.post(request.url, content=content, headers=headers)
        body = msgspec.json.decode(answer.content)
        response = BatchResponse(status_code=answer.status_code, request_id=answer.headers["x-request-id"], body=body)
        return _reply(request.custom_id, response, None if answer.is_success else body.get("error"))


def _custom_id(line: str) -> str | None:
    """Of a line that is wrong elsewhere."""
    try:
        found = msgspec.json.decode(line)
    except (msgspec.DecodeError, RecursionError):
        return None
    name = found.get("custom_id") if isinstance(found, dict) else None
    return name if isinstance(name, str) else None


def _refused(custom_id: str | None, code: str, message: str) -> BatchReply:
    return _reply(custom_id, None, {"code": code, "message": message, "type": "invalid_request_error", "param": None})


def _reply(custom_id: str | None, response: BatchResponse | None, error: dict[str, Any] | None) -> BatchReply:
    return BatchReply(id=f"batch_req_{uuid.uuid4().hex}", custom_id=custom_id, response=response, error=error)
