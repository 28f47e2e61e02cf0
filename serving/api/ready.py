"""What a started server says: where it is, and a command and a program that work as pasted."""

from __future__ import annotations

import json
import shlex
import socket
from dataclasses import replace

from pagoda.serving.api.config import ServerConfig
from pagoda.serving.api.keys import keys_of
from pagoda.serving.api.service import Service


def actual(config: ServerConfig, sock: socket.socket) -> ServerConfig:
    """The configuration with the port that the system gave."""
    return config if config.uds else replace(config, port=sock.getsockname()[1])


def ready_text(service: Service, sock: socket.socket, grpc: socket.socket | None, seconds: float) -> str:
    """The lines that `pagoda serve` prints when it takes requests."""
    config, model = actual(service.config, sock), service.card.names[0]
    where = f"the Unix socket {config.uds}" if config.uds else config.url
    first = f"Pagoda is ready after {seconds:.1f} s: {model} on {service.client.facts.device} at {where}"
    if grpc is not None:
        first += f" and gRPC at {config.reachable_host}:{grpc.getsockname()[1]}"
    return "\n".join([first, "  " + curl_line(config, model), "  " + python_line(config, model)])


def curl_line(config: ServerConfig, model: str) -> str:
    """A chat request for the shell."""
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 32})
    parts = ["curl"]
    parts += ["--unix-socket", shlex.quote(config.uds)] if config.uds else []
    parts += ["-k"] if config.ssl_certfile else []
    parts += [f"{config.url}{config.root_path}/v1/chat/completions", "-H", "'Content-Type: application/json'"]
    parts += ["-H", "'Authorization: Bearer YOUR_KEY'"] if keys_of(config) else []
    return " ".join([*parts, "-d", shlex.quote(body)])


def python_line(config: ServerConfig, model: str) -> str:
    """The same with the `openai` package."""
    key = "YOUR_KEY" if keys_of(config) else "none"
    imports, client = "from openai import OpenAI", ""
    if config.uds:
        imports += "; import httpx"
        client = f", http_client=httpx.Client(transport=httpx.HTTPTransport(uds={config.uds!r}))"
    elif config.ssl_certfile:
        imports += "; import httpx"
        client = ", http_client=httpx.Client(verify=False)"
    code = (
        f"{imports}; print(OpenAI(base_url={config.url + config.root_path + '/v1'!r}, api_key={key!r}{client})"
        f".chat.completions.create(model={model!r}, messages=[{{'role': 'user', 'content': 'Say hello.'}}], max_tokens=32)"
        ".choices[0].message.content)"
    )
    return f"python -c {_double_quoted(code)}"


def _double_quoted(code: str) -> str:
    escaped = code.replace("\\", "\\\\").replace('"', '\\"').replace("$", "\\$").replace("`", "\\`")
    return f'"{escaped}"'
