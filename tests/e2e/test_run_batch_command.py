"""`pagoda run-batch` as its users run it: the default model from file to file, MiniLM from address to address."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import minilm
import pytest

COMMAND = [sys.executable, "-m", "pagoda.serving.cli.main", "run-batch"]
SMALL = ["--device", "cpu", "--kv-cache-memory-bytes", "64M"]


def lines(*requests):
    return "".join(json.dumps({"custom_id": name, "method": "POST", "url": url, "body": body}) + "\n" for name, url, body in requests)


def batch(*words):
    return subprocess.run([*COMMAND, *words, *SMALL], capture_output=True, text=True, timeout=200, check=False)


@pytest.mark.heavy
def test_a_file_of_completions(tmp_path, default_model_here, require):
    require("default model", default_model_here)
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    chat = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 8, "temperature": 0}
    requests = [("wrong", "/v1/completions", {"prompt": "a", "top_p": 7}), ("chat", "/v1/chat/completions", chat)]
    requests += [(f"line-{i}", "/v1/completions", {"prompt": f"{i} and", "max_tokens": 4}) for i in range(12)]
    source.write_text(lines(*requests))
    done = batch("-i", str(source), "-o", str(target), "--max-model-len", "512")
    assert done.returncode == 0, done.stderr
    assert "14 requests in" in done.stderr and "1 of them failed" in done.stderr
    replies = [json.loads(line) for line in target.read_text().splitlines()]
    assert [reply["custom_id"] for reply in replies] == [name for name, _, _ in requests]
    assert replies[0]["error"]["param"] == "top_p"
    assert replies[1]["response"]["body"]["choices"][0]["message"]["content"].startswith("The capital of France is Paris")
    assert all(reply["response"]["body"]["usage"]["completion_tokens"] == 4 for reply in replies[2:])


class Shelf(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.server.source.encode())

    def do_PUT(self):
        self.server.target = self.rfile.read(int(self.headers["Content-Length"])).decode()
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.mark.heavy
def test_vectors_and_scores_from_address_to_address(require):
    where = minilm.folder()
    require(minilm.PACKAGE, where is not None)
    pair = {"text_1": "a tower", "text_2": ["a pagoda", "a soup"]}
    rank = {"query": "a tower", "documents": ["a soup", "a pagoda"], "return_documents": False}
    with HTTPServer(("127.0.0.1", 0), Shelf) as shelf:
        shelf.source = lines(
            ("vectors", "/v1/embeddings", {"input": ["a", "b"]}), ("scores", "/v1/score", pair), ("ranks", "/v1/rerank", rank)
        )
        threading.Thread(target=shelf.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{shelf.server_port}/batch.jsonl"
        try:
            done = batch(str(where), "-i", address, "-o", address)
        finally:
            shelf.shutdown()
    assert done.returncode == 0, done.stderr
    vectors, scores, ranks = (json.loads(line)["response"]["body"] for line in shelf.target.splitlines())
    assert [len(one["embedding"]) for one in vectors["data"]] == [384, 384]
    assert scores["data"][0]["score"] > scores["data"][1]["score"]
    assert [one["index"] for one in ranks["results"]] == [1, 0]
