"""What surrounds the protocols: models, tokens, keys, ids, CORS, root path, metrics, numbers, the page."""

import re
import threading
from dataclasses import fields
from pathlib import Path

import pytest
from pagoda.hal.errors import ConfigError
from pagoda.serving import api
from pagoda.serving.api.address import check_tls
from pagoda.serving.api.config import ServerConfig
from pagoda.serving.api.statlog import stats_line
from pagoda.serving.engine.messages import EngineStats
from pagoda.serving.frontend.text import TextFrontend
from toy_engine import ToyTokenizer
from toy_server import toy_server


async def test_models():
    async with toy_server() as toy:
        listed = (await toy.http.get("/v1/models")).json()
        alias = (await toy.http.get("/v1/models/toy-alias")).json()
        missing = await toy.http.get("/v1/models/org/other")
        reply = (await toy.complete("a", model="toy-alias")).json()
    assert [entry["id"] for entry in listed["data"]] == ["toy", "toy-alias"]
    assert (alias["root"], alias["max_model_len"], alias["object"]) == ("toy-root", 4096, "model")
    assert missing.status_code == 404
    assert reply["model"] == "toy-alias"


async def test_tokenize_and_back():
    async with toy_server() as toy:
        text = (await toy.http.post("/tokenize", json={"prompt": "hé", "return_token_strs": True})).json()
        bare = (await toy.http.post("/tokenize", json={"prompt": "hé", "add_special_tokens": False})).json()
        chat = (await toy.http.post("/tokenize", json={"messages": [{"role": "user", "content": "x" * 3000}]})).json()
        back = (await toy.http.post("/detokenize", json={"tokens": bare["tokens"]})).json()
    assert text == {"count": 4, "max_model_len": 4096, "tokens": [257, 104, 195, 169], "token_strs": ["<bos>", "h", "Ã", "©"]}
    assert chat["count"] == 3000 + len("user:\nassistant:")
    assert back == {"prompt": "hé"}


async def test_keys():
    async with toy_server(api_key=("one", "two")) as toy:
        assert (await toy.chat()).status_code == 401
        for header, status in (("Bearer one", 200), ("Bearer two", 200), ("bearer two", 200), ("Bearer three", 401), ("one", 401)):
            toy.http.headers["authorization"] = header
            assert (await toy.chat()).status_code == status, header
        del toy.http.headers["authorization"]
        for path in ("/health", "/metrics", "/", "/version", "/ping", "/stats"):
            assert (await toy.http.get(path)).status_code == 200, path
        for path in ("/server_info", "/v1/models"):
            assert (await toy.http.get(path)).status_code == 401, path
        assert (await toy.http.post("/reset_prefix_cache")).status_code == 401


async def test_request_ids():
    async with toy_server() as toy:
        given = await toy.http.post("/v1/completions", json={"prompt": "a"}, headers={"x-request-id": "mine-7"})
        made = await toy.complete("a")
        field = await toy.complete("a", request_id="theirs")
        again = await toy.complete("a", request_id="theirs")
    assert given.headers["x-request-id"] == "mine-7"
    assert given.json()["id"] == "cmpl-mine-7"
    assert re.fullmatch("[0-9a-f]{32}", made.headers["x-request-id"])
    assert field.json()["id"] == again.json()["id"] == "cmpl-theirs"
    assert len({request.request_id for request in toy.engine.requests}) == 4


async def test_cors_is_off_until_asked_for():
    headers = {"origin": "https://page.example", "access-control-request-method": "POST"}
    async with toy_server() as toy:
        assert "access-control-allow-origin" not in (await toy.http.get("/version", headers=headers)).headers
    async with toy_server(allowed_origins=("https://page.example",), api_key=("k",)) as toy:
        reply = await toy.http.options("/v1/chat/completions", headers=headers)
        assert reply.status_code == 200
        assert reply.headers["access-control-allow-origin"] == "https://page.example"


async def test_root_path():
    async with toy_server(root_path="/llm", api_key=("k",)) as toy:
        assert (await toy.http.get("/health")).status_code == 200
        assert (await toy.http.get("/server_info")).status_code == 401


async def test_metrics_have_the_known_names():
    async with toy_server() as toy:
        await toy.complete("abcdef")
        text = (await toy.http.get("/metrics")).text
    for name in (
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
        "vllm:num_preemptions_total",
        "vllm:prefix_cache_queries_total",
        "vllm:prefix_cache_hits_total",
        "vllm:time_to_first_token_seconds_count",
        "vllm:inter_token_latency_seconds_sum",
        "vllm:e2e_request_latency_seconds_bucket",
        "vllm:request_prompt_tokens_count",
        "vllm:request_generation_tokens_count",
    ):
        assert re.search(rf'^{name}{{[^}}]*model_name="toy"', text, re.MULTILINE), name
    assert re.search(r'^vllm:request_success_total{engine="0",finished_reason="stop",model_name="toy"} 1\.0', text, re.MULTILINE)
    assert re.search(r"^vllm:generation_tokens_total{.*} 8\.0", text, re.MULTILINE)
    assert "vllm:cache_config_info{" in text


async def test_small_endpoints():
    async with toy_server() as toy:
        assert (await toy.http.get("/ping")).status_code == 200
        assert (await toy.http.post("/ping")).status_code == 200
        assert (await toy.http.get("/version")).json() == {"version": "0.1.0"}
        assert (await toy.http.get("/load")).json() == {"server_load": 0}
        assert (await toy.http.post("/reset_prefix_cache")).json() == {"reset": True}
        assert (await toy.http.get("/server_info")).json()["engine"]["kernels"] == {"gemm": "toy"}
        stats = (await toy.http.get("/stats")).json()
        assert (stats["model"], stats["pages_total"], stats["running"]) == ("toy", 1024, 0)
        page = await toy.http.get("/")
        assert page.headers["content-type"].startswith("text/html")
        assert "connect-src 'self'" in page.headers["content-security-policy"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"port": 70000}, "no TCP port"),
        ({"ssl_keyfile": "k"}, "ssl_certfile"),
        ({"ssl_cert_reqs": 2, "ssl_certfile": "c"}, "ssl_ca_certs"),
        ({"ssl_cert_reqs": 5}, "must be 0"),
        ({"api_key": ("",)}, "api_key is empty"),
        ({"shutdown_timeout": -1}, "negative"),
        ({"max_num_queued_reqs": 0}, "at least 1"),
    ],
)
def test_flags_that_cannot_work(flags, words):
    with pytest.raises(ConfigError, match=words):
        ServerConfig(**flags)


@pytest.mark.parametrize("text", [None, "no certificate"])
def test_a_certificate_that_cannot_be_read_is_named_before_anything_loads(tmp_path, text):
    path = tmp_path / "cert.pem"
    if text:
        path.write_text(text)
    with pytest.raises(ConfigError, match=r"ssl_certfile=.*cert\.pem.*give two PEM files"):
        check_tls(ServerConfig(ssl_certfile=str(path)))


def test_the_stats_line():
    now = EngineStats(running=2, waiting=1, pages_total=10, pages_used=5, prompt_tokens=100, generation_tokens=50, prefix_queries=40)
    line = stats_line(now, EngineStats(generation_tokens=30), 10.0)
    assert line == "10.0 prompt and 2.0 generated tokens/s; 2 running, 1 waiting; KV pages 50.0% used; prefix hits 0.0%"


class WatchedTokenizer(ToyTokenizer):
    def __init__(self):
        self.threads = []

    def encode(self, text, **options):
        self.threads.append(threading.current_thread() is threading.main_thread())
        return super().encode(text, **options)


async def test_long_texts_are_encoded_off_the_event_loop():
    async with toy_server() as toy:
        tokenizer = WatchedTokenizer()
        toy.service.text = TextFrontend(tokenizer, toy.service.text.template)
        await toy.complete("short")
        await toy.complete("x" * 3000)
        await toy.chat("x" * 3000)
        await toy.http.post("/tokenize", json={"prompt": "x" * 3000})
    assert tokenizer.threads == [True, False, False, False]


def test_every_flag_is_read_somewhere():
    sources = [path.read_text() for path in Path(api.__file__).parent.rglob("*.py") if path.name != "config.py"]
    unread = [field.name for field in fields(ServerConfig) if not any(re.search(rf"config\.{field.name}\b", text) for text in sources)]
    assert unread == []
