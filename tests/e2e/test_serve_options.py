"""Options of a real server that are read before anything loads: file, aliases, overrides, Unix socket, code of checkpoints."""

from __future__ import annotations

import httpx
import pytest
from toy_process import SERVE, ServerProcess


@pytest.mark.heavy
def test_a_file_of_options_reaches_the_server(tmp_path, default_model_here, require):
    require("default model", default_model_here)
    path = str(tmp_path / "pagoda.sock")
    lines = [
        "device: cpu",
        "kv-cache-memory-bytes: 64M",
        f"uds: {path}",
        "served-model-name: [first, second]",
        "hf-overrides: {max_position_embeddings: 321}",
        "trust-remote-code: true",
        "enable-prefix-caching: false",
        "default-chat-template-kwargs: {unused: 1}",
    ]
    (tmp_path / "pagoda.yaml").write_text("\n".join(lines))
    command = [*SERVE, "--config", str(tmp_path / "pagoda.yaml"), "--served-model-name", "mine", "alias"]
    with ServerProcess(command, patience=180) as server:
        with httpx.Client(transport=httpx.HTTPTransport(uds=path), base_url="http://localhost", timeout=60) as http:
            models = http.get("/v1/models").json()["data"]
            assert [one["id"] for one in models] == ["mine", "alias"]  # the command line wins
            assert {one["max_model_len"] for one in models} == {321}
            for name in ("mine", "alias"):
                reply = http.post("/v1/completions", json={"model": name, "prompt": "a", "max_tokens": 1})
                assert reply.status_code == 200 and reply.json()["model"] == name
            assert http.post("/v1/completions", json={"model": "first", "prompt": "a"}).status_code == 404
            chat = {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 6, "temperature": 0}
            rendered = http.post("/v1/chat/completions/render", json=chat).json()
            by_ids = http.post("/inference/v1/generate", json=rendered).json()["choices"][0]["token_ids"]
            text = http.post("/detokenize", json={"tokens": by_ids}).json()["prompt"]
            said = http.post("/v1/chat/completions", json=chat).json()["choices"][0]["message"]["content"]
            assert text.removesuffix("<|im_end|>") == said and len(by_ids) == 6
            too_long = http.post("/v1/completions", json={"prompt": "a " * 400, "max_tokens": 1})
            assert too_long.status_code == 400 and "321" in too_long.json()["error"]["message"]
            assert http.get("/server_info").json()["engine_config"]["enable_prefix_caching"] is False
        assert any("--trust-remote-code has no effect" in line for line in server.errors)
