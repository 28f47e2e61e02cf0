"""`--api-server-count`: several API processes on one socket and one engine."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from pathlib import Path

import httpx
import psutil
import pytest
from api_processes import connections, fronts, processes
from lora_folders import make_adapter
from pagoda.serving.api.fronts import SHORT_LIFE
from patience import LIMIT_S, until
from toy_process import SERVE, SMALL_POOL, ServerProcess

pytestmark = pytest.mark.heavy


def started(*words):
    return ServerProcess(
        [*SERVE, *SMALL_POOL, "--api-server-count", "3", "--max-num-queued-reqs", "64", "--enable-lora", *words], patience=180
    )


def metric(where, name):
    text = httpx.get(f"{where}/metrics").text
    return sum(float(value) for value in re.findall(rf"^{re.escape(name)}(?:{{.*}})? (\S+)$", text, re.MULTILINE))


def running(where):
    return httpx.get(f"{where}/stats").json()["running"]


class Connections:
    """Clients of a connection each, and which process holds it."""

    def __init__(self, server):
        self.clients, self.pids = connections(server)

    def close(self):
        for client in self.clients:
            client.close()


@pytest.fixture(scope="module")
def three(default_model_here):
    if not default_model_here:
        yield None
        return
    with started() as server:
        yield server


@pytest.fixture
def several(three, require):
    require("default model", three is not None)
    return three


@pytest.fixture
def made(several):
    """Connections to every process."""
    made = Connections(several)
    yield made
    made.close()


def test_all_processes_answer_alike_and_their_metrics_are_one(several, made):
    before = metric(several.where, "vllm:request_success_total")
    texts = [
        client.post("/v1/completions", json={"prompt": "One two", "max_tokens": 4, "temperature": 0}).json()["choices"][0]["text"]
        for client in made.clients
    ]
    assert len(set(texts)) == 1
    seen = {metric(str(client.base_url), "vllm:request_success_total") for client in made.clients[:6]}
    assert seen == {before + len(made.clients)}
    assert metric(several.where, "vllm:e2e_request_latency_seconds_count") == before + len(made.clients)
    assert metric(several.where, "vllm:cache_config_info") == 1


def test_a_client_that_leaves_any_process_ends_its_request(several, made):
    for pid in set(made.pids):
        client = made.clients[made.pids.index(pid)]
        body = {"prompt": "Count:", "max_tokens": 1500, "ignore_eos": True, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.iter_lines()  # closes the connection when it is dropped
            next(lines)
            assert httpx.get(f"{several.where}/load").json()["server_load"] == 1
        until(lambda: running(several.where) == 0)
    until(lambda: httpx.get(f"{several.where}/load").json()["server_load"] == 0)


def test_an_adapter_that_one_process_loads_is_there_for_all(several, made, tmp_path):
    folder = make_adapter(tmp_path / "adapter", {"model.layers.0.self_attn.q_proj": (576, 576)}, seed=1, strength=30.0)
    loaded = made.clients[-1].post("/v1/load_lora_adapter", json={"lora_name": "mine", "lora_path": str(folder)})
    assert loaded.status_code == 200, loaded.text

    def answers(name):
        body = {"prompt": "One two", "model": name, "max_tokens": 6, "temperature": 0}
        return [client.post("/v1/completions", json=body) for client in made.clients]

    until(lambda: all(answer.status_code == 200 for answer in answers("mine")))
    [changed], [plain] = ({answer.json()["choices"][0]["text"] for answer in answers(name)} for name in ("mine", "smollm2-135m-instruct"))
    assert changed != plain
    assert made.clients[0].post("/v1/unload_lora_adapter", json={"lora_name": "mine"}).status_code == 200
    until(lambda: all(answer.status_code == 404 for answer in answers("mine")))


def test_a_killed_process_is_noticed_and_its_requests_end_in_the_engine(several, made):
    victim = next(pid for pid in made.pids if pid != several.process.pid)
    client = made.clients[made.pids.index(victim)]
    finished = metric(several.where, "vllm:request_success_total")
    time.sleep(max(0.0, SHORT_LIFE + 1 - (time.time() - psutil.Process(victim).create_time())))
    body = {"prompt": "Count:", "max_tokens": 1900, "ignore_eos": True}
    failed = []

    def ask():
        try:
            client.post("/v1/completions", json=body)
        except httpx.HTTPError as error:
            failed.append(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    until(lambda: running(several.where) == 1)
    os.kill(victim, signal.SIGKILL)
    until(lambda: running(several.where) == 0)
    thread.join(LIMIT_S)
    assert failed
    assert httpx.get(f"{several.where}/load").json()["server_load"] == 0
    until(lambda: any("aborted in the engine" in line for line in several.errors))
    # what it had counted stays counted, and another one takes its place
    assert metric(several.where, "vllm:request_success_total") >= finished
    until(lambda: len(fronts(several)) == 2 and victim not in processes(several))
    for _ in range(20):
        assert httpx.post(f"{several.where}/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200


def test_limits_hold_for_all_processes_together(several, made):
    codes = []

    def ask(client):
        codes.append(client.post("/v1/completions", json={"prompt": "x " * 900, "max_tokens": 1}).status_code)

    threads = [threading.Thread(target=ask, args=(client,), daemon=True) for client in made.clients]
    others = [httpx.Client(base_url=several.where, timeout=60) for _ in range(100)]
    threads += [threading.Thread(target=ask, args=(client,), daemon=True) for client in others]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for client in others:
        client.close()
    assert set(codes) == {200, 429}
    assert metric(several.where, "vllm:admission_rejections_total") == codes.count(429)


def test_sigterm_drains_all_of_them(several, made):
    chosen = [made.clients[made.pids.index(pid)] for pid in set(made.pids)]
    answers = []

    def ask(client):
        body = {"prompt": "Count:", "max_tokens": 60, "ignore_eos": True}
        answers.append(client.post("/v1/completions", json=body).json()["choices"][0]["finish_reason"])

    threads = [threading.Thread(target=ask, args=(client,), daemon=True) for client in chosen]
    for thread in threads:
        thread.start()
    until(lambda: running(several.where) == len(chosen))
    pids = [front.pid for front in fronts(several)]
    several.signal(signal.SIGTERM)
    for thread in threads:
        thread.join(LIMIT_S)
    assert answers == ["length"] * len(chosen)
    assert several.wait() == 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
