"""`/start_profile` and `/stop_profile` of real servers: a trace a rank with the steps in between, and nothing without the flag."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import httpx
import pytest
from tiny_servers import tiny_server

pytestmark = pytest.mark.heavy
BODY = {"prompt": [30, 40, 50], "max_tokens": 7, "ignore_eos": True, "temperature": 0}


@pytest.mark.parametrize("ranks", [1, 2])
def test_steps_between_start_and_stop_are_traced_on_every_rank(tmp_path, ranks):
    folder = tmp_path / "traces" / "deep"
    config = json.dumps({"profiler": "torch", "torch_profiler_dir": str(folder)})
    flags = ("--profiler-config", config, "--tensor-parallel-size", str(ranks))
    with tiny_server(tmp_path / "model", "generate", *flags) as server, httpx.Client(base_url=server.where, timeout=60) as http:
        plain = http.post("/v1/completions", json=BODY).json()["choices"][0]["text"]
        refused = http.post("/stop_profile")
        assert refused.status_code == 400 and "start one first" in refused.text
        for _ in range(2):
            assert http.post("/start_profile").status_code == 200
            again = http.post("/start_profile")
            assert again.status_code == 400 and "already" in again.text
            assert http.post("/v1/completions", json=BODY).json()["choices"][0]["text"] == plain
            files = http.post("/stop_profile").json()["files"]
            assert len(files) == len({*files}) == ranks
            for path in map(Path, files):
                assert path.parent == folder
                assert 4 <= len(steps(path)) <= 7, steps(path)
        assert len([*folder.iterdir()]) == 2 * ranks
        assert http.post("/v1/completions", json=BODY).json()["choices"][0]["text"] == plain


def steps(path: Path) -> list[str]:
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return [event["name"] for event in events if event["name"].startswith("step of ") and event.get("cat") == "user_annotation"]


def test_without_the_flag_there_is_none_and_a_folder_that_cannot_be_is_named(tmp_path):
    with tiny_server(tmp_path / "model", "generate") as server:
        missing = httpx.post(f"{server.where}/start_profile")
        assert missing.status_code == 404 and "--profiler-config" in missing.text
        assert httpx.post(f"{server.where}/stop_profile").status_code == 404
    config = json.dumps({"torch_profiler_dir": "/proc/version/traces"})
    with tiny_server(tmp_path / "model", "generate", "--profiler-config", config) as server:
        refused = httpx.post(f"{server.where}/start_profile")
        assert refused.status_code == 500 and "no profile can be taken" in refused.text
        assert httpx.post(f"{server.where}/v1/completions", json=BODY).status_code == 200
