"""The command line as its users run it: real processes, the default model, and what goes wrong."""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from pagoda.models.loading.reference import resolve
from toy_process import ServerProcess

COMMAND = [sys.executable, "-m", "pagoda.serving.cli.main"]


def run(*words: str, text: str = "", seconds: float = 250) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *words], input=text, capture_output=True, text=True, timeout=seconds, check=False)


@pytest.fixture(scope="module")
def model() -> Path:
    return resolve("smollm2-135m-instruct")


@pytest.mark.heavy
def test_generate_streams_the_default_model() -> None:
    done = run("generate", "The capital of France is", "--temperature", "0", "--max-tokens", "8")
    assert done.returncode == 0 and done.stdout.startswith(" Paris")
    assert re.search(r"8 tokens, [\d.]+ tokens/s, first after \d+ ms, cut at its limit\n$", done.stderr)


@pytest.mark.heavy
def test_generate_reads_standard_input_and_chats(model: Path) -> None:
    done = run(
        "generate", str(model), "-", "--chat", "--quiet", "--temperature", "0", "--max-tokens", "16", text="What is the capital of France?"
    )
    assert (done.returncode, done.stdout) == (0, "The capital of France is Paris.\n")
    assert "tokens/s" not in done.stderr


@pytest.mark.heavy
def test_an_interrupt_ends_generate_at_once() -> None:
    command = [*COMMAND, "generate", "Once upon a time", "--max-tokens", "4000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout and process.stderr
        try:
            first = process.stdout.read(4)
            process.send_signal(signal.SIGINT)
            rest, errors = process.communicate(timeout=250)
        finally:
            process.kill()
    assert process.returncode == 130 and len(first + rest) < 3000 and "Traceback" not in errors


@pytest.mark.heavy
def test_chat_in_a_pipe() -> None:
    done = run("chat", "--temperature", "0", "--max-tokens", "16", text="What is the capital of France?")
    assert (done.returncode, done.stdout) == (0, "The capital of France is Paris.\n")


@pytest.mark.heavy
def test_serve_answers_drains_and_leaves_nothing() -> None:
    with ServerProcess([*COMMAND, "serve", "--host", "127.0.0.1", "--port", "0", "--max-model-len", "512"]) as server:
        asked = run("chat", "--url", server.where, "--temperature", "0", "--max-tokens", "16", text="What is the capital of France?")
        assert (asked.returncode, asked.stdout) == (0, "The capital of France is Paris.\n")
        load = ["--num-prompts", "3", "--input-len", "16", "--output-len", "4", "--json", "-"]
        measured = json.loads(run("bench", "serve", "--url", server.where, *load).stdout)
        assert (measured["completed"], measured["output_tokens"]) == (3, 12)
        children = _children(server.process.pid)
        assert children
        server.process.terminate()
        assert server.wait() == 0
        assert not [pid for pid in children if Path(f"/proc/{pid}").exists()]


def _children(pid: int) -> list[int]:
    return [int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()]


@pytest.mark.heavy
@pytest.mark.parametrize("kind", ["latency", "throughput"])
def test_benchmarks_of_the_engine(kind: str) -> None:
    shape = {"latency": ["--batch-size", "2", "--num-iters", "2", "--num-iters-warmup", "1"], "throughput": ["--num-prompts", "3"]}[kind]
    done = run("bench", kind, *shape, "--input-len", "8", "--output-len", "4", "--json", "-")
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert record["kind"] == kind and record["model"] == "smollm2-135m-instruct"
    assert len(record["seconds"]) == 2 if kind == "latency" else record["output_tokens"] == 12


@pytest.mark.heavy
def test_startup_is_timed_to_the_first_token() -> None:
    done = run("bench", "startup", "--num-iters", "1", "--max-model-len", "256", "--json", "-")
    assert done.returncode == 0, done.stderr
    (once,) = json.loads(done.stdout)["runs"]
    assert 0 < once["ready_s"] < once["first_token_s"]
    parts = [seconds for name, seconds in once.items() if name.startswith("of which ")]
    assert len(parts) == 4 and all(seconds > 0 for seconds in parts) and sum(parts) == pytest.approx(once["ready_s"])


def test_a_port_in_use_is_known_before_anything_loads() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = run("serve", "--host", "127.0.0.1", "--port", str(port))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"pagoda: cannot listen on 127.0.0.1:{port}: Address already in use; choose another --host or --port\n"


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["serve", "--port", "0", "./absent"], 2, "model ./absent: there is no such file or folder"),
        (["generate", "hello", "--model", "absent"], 2, "model 'absent' is no file, no folder"),
        (["generate", "hello", "--device", "warp"], 1, "no such device 'warp'; installed backends:"),
        (["serve", "--port", "0", "--device", "warp"], 1, "no such device 'warp'"),
        (["generate", ""], 2, "there is no prompt"),
        (["serve", "--max-model-length", "5"], 2, "unknown flag --max-model-length; did you mean --max-model-len?"),
        (["serve", "--port", "99999"], 2, "port=99999"),
        (["generate", "hello", "--max-model-len", "100000"], 2, "100000"),
        (["generate", "hello " * 300, "--max-model-len", "128"], 1, "together may have 128"),
    ],
)
def test_what_cannot_work_is_one_line(words: list[str], code: int, message: str) -> None:
    done = run(*words)
    assert done.returncode == code, done.stderr
    assert message in done.stderr and "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("pagoda: ")


@pytest.mark.parametrize("command", [["generate", "hello", "--model"], ["serve", "--port", "0", "--model"]])
def test_a_corrupt_file_is_named(tmp_path: Path, model: Path, command: list[str]) -> None:
    broken = tmp_path / "broken.gguf"
    shutil.copyfile(model, broken)
    with broken.open("r+b") as file:
        file.truncate(5_000_000)
    done = run(*command, str(broken))
    assert done.returncode == 1 and "broken.gguf" in done.stderr and "Traceback" not in done.stderr


def test_debug_adds_the_traceback() -> None:
    done = run("generate", "hello", "--model", "absent", "--debug")
    assert done.returncode == 2 and done.stderr.startswith("Traceback") and "model 'absent'" in done.stderr.splitlines()[-1]
