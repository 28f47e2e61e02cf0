"""kill -9 of each process of a server: every request is told, the server ends or goes on, and no process stays."""

from __future__ import annotations

import os
import signal
import threading
from urllib.parse import urlsplit

import httpx
import psutil
import pytest
from patience import LIMIT_S, until
from tiny_servers import tiny_server

pytestmark = pytest.mark.heavy
LONG = {"prompt": [30, 40, 50], "max_tokens": 500, "ignore_eos": True}


class Asking:
    """Streams and whole requests in threads, each on a connection of its own: what they were told."""

    def __init__(self, where: str, count: int = 4) -> None:
        self.told: list[str] = []
        self._threads = [threading.Thread(target=self._ask, args=(where, number % 2 == 0), daemon=True) for number in range(count)]
        for thread in self._threads:
            thread.start()

    def _ask(self, where: str, stream: bool) -> None:
        try:
            while True:  # again when it was done before the kill came
                answer = httpx.post(f"{where}/v1/completions", json={**LONG, "stream": stream}, timeout=None)
                if answer.status_code != 200 or "error" in answer.text:
                    self.told.append(f"{answer.status_code} {answer.text[-200:]}")
                    return
        except httpx.HTTPError as error:
            self.told.append(repr(error))

    def end(self) -> list[str]:
        for thread in self._threads:
            thread.join(LIMIT_S)
        return self.told


def family(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def gone(processes: list[psutil.Process]) -> None:
    until(lambda: not any(lives(one) for one in processes), f"for the end of {[one.pid for one in processes]}")


def lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def busy(where: str) -> None:
    until(lambda: httpx.get(f"{where}/stats").json()["running"] >= 4)


def test_a_killed_rank_is_told_to_every_request(tmp_path):
    with tiny_server(tmp_path / "model", "generate", "--tensor-parallel-size", "2") as server:
        children = family(server.process.pid)
        # the ranks are the leaves, the engine's process is their parent
        ranks = [one for one in children if any(parent in children for parent in one.parents()[:1])]
        assert len(ranks) == 2, [one.cmdline() for one in children]
        asking = Asking(server.where)
        busy(server.where)
        os.kill(ranks[1].pid, signal.SIGKILL)
        told = asking.end()
        assert len(told) == 4 and all("rank 1" in what for what in told), told
        assert server.wait() == 1
        gone(children)


def test_a_killed_engine_is_told_by_every_api_process(tmp_path):
    with tiny_server(tmp_path / "model", "generate", "--api-server-count", "2") as server:
        children = family(server.process.pid)
        engine = max(children, key=lambda one: one.memory_info().rss)  # torch is in the engine alone
        asking = Asking(server.where, 12)
        busy(server.where)
        os.kill(engine.pid, signal.SIGKILL)
        told = asking.end()
        assert len(told) == 12 and all("signal 9" in what or "refused" in what for what in told), told
        assert server.wait() == 1
        gone(children)


def test_nothing_survives_a_killed_first_process_and_its_port_is_taken_again(tmp_path):
    with tiny_server(tmp_path / "model", "generate", "--api-server-count", "2") as server:
        children = family(server.process.pid)
        assert len(children) >= 2
        asking = Asking(server.where, 8)
        busy(server.where)
        server.signal(signal.SIGKILL)
        gone(children)
        assert len(asking.end()) == 8
    port = str(urlsplit(server.where).port)
    with tiny_server(tmp_path / "model", "generate", "--api-server-count", "2", "--port", port) as again:
        assert urlsplit(again.where).port == int(port)
        assert httpx.post(f"{again.where}/v1/completions", json={**LONG, "max_tokens": 3}, timeout=60).status_code == 200
