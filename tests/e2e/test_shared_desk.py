"""Limits of a key and stored responses over three API processes of one server."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
from urllib.parse import urlsplit

import httpx
import pytest
from api_processes import fronts, holder, of_each, processes
from patience import LIMIT_S, until
from tiny_servers import tiny_server

pytestmark = pytest.mark.heavy
MOST = 5
KEY = {"authorization": "Bearer one"}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    flags = ("--api-server-count", "3", "--api-key", "one", "two", "three", "four", "five", "--key-max-requests", str(MOST))
    with tiny_server(tmp_path_factory.mktemp("three"), "generate", *flags) as server:
        yield server


class Held:
    """A request that is under way as long as its body has not come."""

    def __init__(self, server, key="one"):
        at = urlsplit(server.where)
        self.socket = socket.create_connection((at.hostname, at.port), timeout=LIMIT_S)
        head = ("POST /v1/completions HTTP/1.1", "Host: x", f"Authorization: Bearer {key}", "Content-Type: application/json")
        self.socket.sendall("\r\n".join((*head, "Content-Length: 1000", "", "")).encode())
        self.pid = holder(server, self.socket.getsockname()[1])

    def status(self):
        """None while it is under way."""
        ready, _, _ = select.select([self.socket], [], [], 0)
        return int(self.socket.recv(64).split()[1]) if ready else None


def held(server, count, key="one"):
    return [Held(server, key) for _ in range(count)]


def close(requests):
    for one in requests:
        one.socket.close()


def refused(requests):
    """What those were told that do not go on, which are all but `MOST`."""
    told = {}

    def look():
        told.update((one, status) for one in requests if one not in told and (status := one.status()) is not None)
        return len(told) == len(requests) - MOST

    until(look)
    return list(told.values())


def test_a_keys_requests_are_counted_over_all_processes(server):
    for count, key in ((20, "one"), (60, "three"), (150, "four"), (400, "five")):  # those that were closed are counted for a moment
        requests = held(server, count, key)
        if len({one.pid for one in requests}) == 3:
            break
        close(requests)
    assert {one.pid for one in requests} == set(processes(server))
    assert refused(requests) == [429] * (count - MOST)
    other = held(server, MOST + 1, "two")
    assert refused(other) == [429]
    close([*requests, *other])
    until(lambda: ask(server).status_code == 200)


def test_a_killed_process_gives_back_what_it_had_counted(server):
    requests, others = [], []

    def full():
        requests[:] = [one for one in requests if one.status() is None]
        while len(requests) < MOST:
            one = Held(server)
            (requests if one.pid != server.process.pid else others).append(one)
            close(others)
        return ask(server).status_code == 429

    until(full)
    for pid in {one.pid for one in requests}:
        os.kill(pid, signal.SIGKILL)
    until(lambda: ask(server).status_code == 200)
    close(requests)


def ask(server):
    return httpx.post(f"{server.where}/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers=KEY, timeout=60)


@pytest.fixture(scope="module")
def clients(tmp_path_factory):
    """One for each process of a server, the first one's first."""
    with tiny_server(tmp_path_factory.mktemp("stored"), "generate", "--api-server-count", "3") as server:
        found, spare = of_each(server)
        yield [found[server.process.pid], *(found[front.pid] for front in fronts(server))]
        for client in spare:
            client.close()


@pytest.mark.parametrize("maker", [0, 1])
def test_a_response_is_found_through_any_process(clients, maker):
    made = clients[maker].post("/v1/responses", json={"input": "hello", "max_output_tokens": 4}).json()
    one = f"/v1/responses/{made['id']}"
    for client in clients:
        assert client.get(one).json() == made
        assert client.get(one + "/input_items").json()["data"][0]["role"] == "user"
        following = client.post("/v1/responses", json={"input": "on", "previous_response_id": made["id"], "max_output_tokens": 2})
        assert following.json()["usage"]["input_tokens"] > made["usage"]["input_tokens"]
    assert clients[maker - 1].delete(one).json()["deleted"]
    assert [client.get(one).status_code for client in clients] == [404] * 3


@pytest.mark.parametrize("maker", [0, 1, 2])
def test_a_response_in_the_background_is_cancelled_through_any_process(clients, maker):
    body = {"input": "hello", "background": True, "max_output_tokens": 480}
    for other in range(3):
        made = clients[maker].post("/v1/responses", json=body).json()
        one = f"/v1/responses/{made['id']}"
        ended = clients[other].post(one + "/cancel").json()
        assert ended["status"] == "cancelled"
        assert [client.get(one).json()["status"] for client in clients] == ["cancelled"] * 3
    finished = clients[maker].post("/v1/responses", json=body | {"max_output_tokens": 3}).json()
    until(lambda: clients[maker - 1].get(f"/v1/responses/{finished['id']}").json()["status"] in ("completed", "incomplete"))
    until(lambda: clients[0].get("/stats").json()["running"] == 0)


@pytest.mark.parametrize("maker", [0, 1, 2])
def test_a_stream_in_the_background_is_followed_through_any_process(clients, maker):
    body = {"input": "hello", "background": True, "stream": True, "max_output_tokens": 40, "ignore_eos": True}
    with clients[maker].stream("POST", "/v1/responses", json=body) as made:
        for line in made.iter_lines():
            if line.startswith("data: "):
                break
    response_id = json.loads(line[6:])["response"]["id"]  # its reader has left: it goes on
    told = [clients[other].get(f"/v1/responses/{response_id}?stream=true").text for other in range(3)]
    assert told[0] == told[1] == told[2]
    events = [json.loads(line[6:]) for line in told[0].split("\n") if line.startswith("data: ")]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1]["response"] == clients[maker - 1].get(f"/v1/responses/{response_id}").json()
    until(lambda: clients[0].get("/stats").json()["running"] == 0)
