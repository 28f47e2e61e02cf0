"""Requests that are refused by their heads alone, over real sockets: at once, with the body unread and the connection in order."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPResponse
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from pagoda.serving.api.refusal import KEPT_BYTES
from patience import LIMIT_S, until
from toy_process import ServerProcess

SMALL = json.dumps({"prompt": "ab", "max_tokens": 1}).encode()


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess.toy(held=0, max_num_queued_reqs=1) as server:
        yield server


@contextmanager
def full_queue(server: ServerProcess) -> Iterator[None]:
    """While one request waits for its first token."""
    where = f"{server.where}/v1/completions"
    thread = threading.Thread(target=lambda: httpx.post(where, content=SMALL, headers=JSON, timeout=LIMIT_S), daemon=True)
    server.hold()
    thread.start()
    until(lambda: httpx.get(f"{server.where}/load").json()["server_load"])
    try:
        yield
    finally:
        server.go_on()
        thread.join()


JSON = {"Content-Type": "application/json"}


def connection(server: ServerProcess) -> HTTPConnection:
    at = urlsplit(server.where)
    return HTTPConnection(str(at.hostname), at.port, timeout=LIMIT_S)


def head(server: ServerProcess, path: str, **headers: Any) -> HTTPResponse:
    """The answer to a request whose body is never sent."""
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: x",
        "Content-Type: application/json",
        *(f"{k.replace('_', '-')}: {v}" for k, v in headers.items()),
    ]
    at = urlsplit(server.where)
    with socket.create_connection((at.hostname, at.port), timeout=LIMIT_S) as sock:
        sock.sendall("\r\n".join([*lines, "", ""]).encode())
        answer = HTTPResponse(sock)
        answer.begin()
        answer.body = answer.read()  # type: ignore[attr-defined]
        return answer


def test_the_answer_does_not_wait_for_the_body(server: ServerProcess) -> None:
    with full_queue(server):
        answer = head(server, "/v1/completions", Content_Length=50 << 20)
        assert (answer.status, answer.getheader("retry-after"), answer.getheader("connection")) == (429, "1", "close")
        error = json.loads(answer.body)["error"]  # type: ignore[attr-defined]
        assert (error["type"], error["code"]) == ("overloaded_error", "queue_full")
        assert answer.getheader("x-request-id")


def test_messages_are_refused_in_their_own_words(server: ServerProcess) -> None:
    with full_queue(server):
        answer = head(server, "/v1/messages", Content_Length=100)
        told = json.loads(answer.body)  # type: ignore[attr-defined]
        assert (answer.status, answer.getheader("retry-after")) == (529, "1")
        assert (told["type"], told["error"]["type"], told["request_id"]) == ("error", "overloaded_error", answer.getheader("request-id"))


def test_a_client_that_waits_for_leave_to_send_gets_none(server: ServerProcess) -> None:
    with full_queue(server):
        answer = head(server, "/v1/chat/completions", Content_Length=100, Expect="100-continue")
        assert (answer.status, answer.getheader("connection")) == (429, "close")  # `begin` skips a 100


def test_after_a_small_body_the_connection_goes_on(server: ServerProcess) -> None:
    http = connection(server)
    with full_queue(server):
        for _ in range(3):
            http.request("POST", "/v1/completions", SMALL, JSON)
            answer = http.getresponse()
            answer.read()
            assert (answer.status, answer.getheader("connection")) == (429, None)
        port = http.sock.getsockname()[1]
        http.request("POST", "/tokenize", json.dumps({"prompt": "ab"}).encode(), JSON)  # takes no place in the queue
        assert json.loads(http.getresponse().read())["count"] == 3
        assert http.sock.getsockname()[1] == port
    http.request("POST", "/v1/completions", SMALL, JSON)
    assert http.getresponse().status == 200
    http.close()


@pytest.mark.parametrize("size", [KEPT_BYTES + 1, 8 << 20])
def test_a_client_that_sends_a_large_body_first_gets_its_answer(server: ServerProcess, size: int) -> None:
    http = connection(server)
    with full_queue(server):
        http.request("POST", "/v1/completions", b" " * size, JSON)
        answer = http.getresponse()
        assert (answer.status, answer.getheader("connection")) == (429, "close")
        assert json.loads(answer.read())["error"]["code"] == "queue_full"
    http.close()


def test_refusals_are_counted(server: ServerProcess) -> None:
    def count() -> float:
        lines = httpx.get(f"{server.where}/metrics").text.splitlines()
        return float(next(line for line in lines if line.startswith("vllm:admission_rejections_total")).rsplit(" ", 1)[1])

    before = count()
    with full_queue(server):
        for path in ("/v1/completions", "/v1/responses", "/v1/embeddings", "/tokenize"):
            head(server, path, Content_Length=0)
    assert count() == before + 3


def test_other_early_errors_answer_early_too() -> None:
    with ServerProcess.toy(0.0, api_key=("k",), max_request_bytes=1000) as server:
        lost = head(server, "/v1/completions", Content_Length=50 << 20)
        assert (lost.status, lost.getheader("connection")) == (401, "close")
        large = head(server, "/v1/completions", Content_Length=50 << 20, Authorization="Bearer k")
        assert (large.status, large.getheader("connection")) == (413, "close")
