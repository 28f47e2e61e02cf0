"""The default model's server besides the protocol: facts, metrics, the printed lines, the page, a short soak, its end."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest
from toy_process import SERVE, SMALL_POOL, ServerProcess

ROOT = Path(__file__).resolve().parent.parent.parent


def test_facts_and_numbers(server, client, model):
    client.completions.create(model=model, prompt="one two three", max_tokens=4)
    info = httpx.get(f"{server.where}/server_info").json()
    assert info["engine"]["max_model_len"] == 2048
    assert info["engine"]["kernels"]
    assert info["engine_config"]["max_model_len"] == 2048
    assert info["server_config"]["api_key"] == 0
    metrics = httpx.get(f"{server.where}/metrics").text
    generated = re.search(r"^vllm:generation_tokens_total{.*} (\S+)", metrics, re.MULTILINE)
    assert float(generated[1]) >= 4
    assert re.search(r"^vllm:num_requests_running{.*} 0\.0", metrics, re.MULTILINE)
    assert httpx.post(f"{server.where}/reset_prefix_cache").json() == {"reset": True}


WRONG = {
    "length_penalty": ("completions", {"prompt": "x", "use_beam_search": True, "n": 2, "length_penalty": 1e300}),
    "messages[0].content[0]": ("chat/completions", {"messages": [{"role": "user", "content": [{"type": []}]}]}),
    "messages[0].tool_calls": ("chat/completions", {"messages": [{"role": "assistant", "tool_calls": ["f"]}]}),
    "chat_template_kwargs": (
        "chat/completions",
        {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"add_generation_prompt": True}},
    ),
}


def test_wrong_requests_name_the_field_and_harm_nobody(server):
    for field, (path, body) in WRONG.items():
        answer = httpx.post(f"{server.where}/v1/{path}", json=body, timeout=60)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field), answer.text
    assert httpx.get(f"{server.where}/health").status_code == 200


@pytest.mark.heavy
def test_a_short_soak(server):
    command = [sys.executable, str(ROOT / "benchmarks/soak.py"), "--url", server.where, "--requests", "60", "--longest-answer", "16"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.heavy
def test_the_guide_works_as_written(server):
    text = (ROOT / "docs/guide/server.md").read_text()
    commands = [block for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL) if not block.startswith("pagoda serve")]
    assert len(commands) >= 6
    for command in commands:
        here = command.replace("http://127.0.0.1:8000", server.where).replace("python ", f"{sys.executable} ", 1)
        done = subprocess.run(["bash", "-ec", here], capture_output=True, text=True, timeout=250, cwd=ROOT, check=False)
        assert done.returncode == 0, (command, done.stderr)
        assert '"error":{' not in done.stdout, (command, done.stdout)  # the key alone stands in every response
    for line in server.lines[1:3]:
        command = ["bash", "-ec", line.replace("python ", f"{sys.executable} ", 1)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, (line, done.stderr)
        assert done.stdout.strip()


@pytest.mark.heavy
def test_a_killed_engine_ends_the_server_and_no_process_stays(require, default_model_here):
    require("default model", default_model_here)
    with ServerProcess([*SERVE, *SMALL_POOL], patience=180) as server:
        children = psutil.Process(server.process.pid).children(recursive=True)
        assert children
        os.kill(children[0].pid, signal.SIGKILL)
        assert server.wait() == 1
        assert any("signal 9" in line for line in server.errors)
        assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.heavy
def test_sigterm_drains_and_no_process_stays(require, default_model_here):
    require("default model", default_model_here)
    with ServerProcess([*SERVE, *SMALL_POOL], patience=180) as server:
        children = psutil.Process(server.process.pid).children(recursive=True)
        body = {"prompt": "Once", "max_tokens": 40, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{server.where}/v1/completions", json=body, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            server.signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        assert server.wait() == 0
        assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.heavy
def test_torch_is_in_the_engine_alone(server):
    children = psutil.Process(server.process.pid).children(recursive=True)
    assert "libtorch" not in Path(f"/proc/{server.process.pid}/maps").read_text()
    assert any("libtorch" in Path(f"/proc/{child.pid}/maps").read_text() for child in children)
