"""Aborts by id over two API processes of one server: over HTTP through either, over gRPC through the first."""

from __future__ import annotations

import threading

import grpc
import pytest
from api_processes import of_each, processes
from pagoda.serving.api.grpc import pagoda_pb2 as pb
from pagoda.serving.api.grpc.pagoda_pb2_grpc import InferenceStub
from patience import LIMIT_S, until
from tiny_servers import tiny_server

pytestmark = pytest.mark.heavy


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    flags = ("--api-server-count", "2", "--grpc-port", "0", "--request-timeout", "60")
    with tiny_server(tmp_path_factory.mktemp("two"), "generate", *flags) as server:
        yield server


@pytest.fixture(scope="module")
def clients(server):
    """For each process, the first one first: one to ask through, and one to abort through."""
    (asking, spare), (ending, more) = of_each(server), of_each(server)
    pids = processes(server)
    yield [asking[pid] for pid in pids], [ending[pid] for pid in pids]
    for client in (*spare, *more):
        client.close()


class Running:
    """Requests of this id, one after another until one is aborted: a tiny model answers fast."""

    def __init__(self, client, name):
        self.reason, self._stop = None, False
        self._thread = threading.Thread(target=self._ask, args=(client, name), daemon=True)
        self._thread.start()

    def _ask(self, client, name):
        body = {"prompt": "a", "max_tokens": 480, "ignore_eos": True, "request_id": name}
        while self.reason != "abort" and not self._stop:
            self.reason = client.post("/v1/completions", json=body).json()["choices"][0]["finish_reason"]

    def end(self):
        self._thread.join(LIMIT_S)
        self._stop = True
        self._thread.join(LIMIT_S)
        return self.reason


@pytest.mark.parametrize("maker", [0, 1])
@pytest.mark.parametrize("through", [0, 1])
def test_over_http_through_any_process(clients, maker, through):
    asking, ending = clients
    running, names = Running(asking[maker], "mine"), {"request_ids": ["x", "cmpl-mine"]}
    until(lambda: ending[through].post("/inference/v1/abort_requests", json=names).json()["request_ids"])
    assert running.end() == "abort"


@pytest.mark.parametrize("maker", [0, 1])
def test_over_grpc(server, clients, maker):
    running = Running(clients[0][maker], "theirs")
    with grpc.insecure_channel(server.grpc) as channel:
        stub = InferenceStub(channel)
        until(lambda: list(stub.Abort(pb.AbortRequest(request_ids=["theirs"])).aborted))
    assert running.end() == "abort"


def test_all_at_once(clients):
    asking, ending = clients
    running, seen = [Running(client, f"one-{place}") for place, client in enumerate(asking)], set()
    until(lambda: seen.update(ending[1].post("/abort_requests", json={}).json()["request_ids"]) or seen >= {"cmpl-one-0", "cmpl-one-1"})
    assert [one.end() for one in running] == ["abort"] * 2
