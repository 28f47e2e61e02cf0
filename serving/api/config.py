"""Everything the HTTP server is told, typed; the command line is generated from this dataclass."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pagoda.hal.errors import ConfigError
from pagoda.serving.engine.config import Flag
from pagoda.serving.engine.params import MAX_LOGPROBS

_LIMITS = (
    "max_num_queued_reqs", "max_num_queued_tokens", "max_request_bytes", "max_prompts", "key_max_requests", "key_requests_per_minute",
    "api_server_count", "stream_interval", "max_log_len",
)  # fmt: skip


@dataclass(frozen=True)
class ServerConfig:
    """Settings of one server. Field names are the flags of `vllm serve` with underscores."""

    host: Annotated[str, Flag("Address to listen on.", section="Server")] = "0.0.0.0"
    port: Annotated[int, Flag("Port to listen on; 0 takes a free one.")] = 8000
    uds: Annotated[str | None, Flag("Path of a Unix socket to listen on instead of host and port.")] = None
    api_server_count: Annotated[
        int, Flag("Processes that take requests and make text, all for one engine, where one cannot keep up with it.", ("-asc",))
    ] = 1
    grpc_port: Annotated[int | None, Flag("Port of the gRPC service, beside HTTP; 0 takes a free one.")] = None
    served_model_name: Annotated[
        tuple[str, ...], Flag("Names that requests may use for the model; the first is the one in replies.", metavar="NAME")
    ] = ()
    api_key: Annotated[
        tuple[str, ...], Flag("Key that clients must send as a bearer token; several may be given.", metavar="KEY", section="Access")
    ] = ()
    api_key_file: Annotated[str | None, Flag("File with one API key a line, so that keys stay out of the process list.")] = None
    api_key_env: Annotated[str | None, Flag("Environment variable with one or more API keys, separated by commas.", metavar="NAME")] = None
    ssl_keyfile: Annotated[str | None, Flag("Private key of the TLS certificate.")] = None
    ssl_certfile: Annotated[str | None, Flag("TLS certificate; turns HTTPS on.")] = None
    ssl_ciphers: Annotated[str | None, Flag("Ciphers that TLS may use, in OpenSSL's words.", metavar="LIST")] = None
    ssl_ca_certs: Annotated[str | None, Flag("Certificates that clients' certificates are checked against.")] = None
    ssl_cert_reqs: Annotated[int, Flag("Client certificates: 0 none, 1 optional, 2 required.")] = int(ssl.CERT_NONE)
    root_path: Annotated[str, Flag("Path under which a proxy mounts the server.")] = ""
    allowed_origins: Annotated[tuple[str, ...], Flag("Origins that browsers may call from; none turns CORS off.", metavar="ORIGIN")] = ()
    allowed_methods: Annotated[tuple[str, ...], Flag("Methods that CORS allows.", metavar="METHOD")] = ("*",)
    allowed_headers: Annotated[tuple[str, ...], Flag("Headers that CORS allows.", metavar="HEADER")] = ("*",)
    allow_credentials: Annotated[bool, Flag("CORS allows credentials.")] = False
    max_num_queued_reqs: Annotated[int | None, Flag("Requests that may wait for their first token; more get 429.", section="Limits")] = None
    max_num_queued_tokens: Annotated[int | None, Flag("Prompt tokens that may wait for their first token; more get 429.")] = None
    key_max_requests: Annotated[int | None, Flag("Requests that one API key may have under way; more get 429.")] = None
    key_requests_per_minute: Annotated[int | None, Flag("Requests that one API key may send a minute; more get 429.")] = None
    request_timeout: Annotated[float | None, Flag("Seconds that a request may take in all; then it ends with 504.")] = None
    max_request_bytes: Annotated[int, Flag("Largest request body; above it 413.")] = 64 << 20
    max_prompts: Annotated[int, Flag("Most prompts in one completions request.")] = 1024
    max_stored_responses: Annotated[
        int, Flag("Answers of /v1/responses that are kept for a later look or turn, the latest used ones; 0 keeps none.")
    ] = 1000
    limit_mm_per_prompt: Annotated[
        dict[str, int], Flag('Most images, videos or sounds of one prompt, such as {"image": 4}.', metavar="JSON", section="Media")
    ] = field(default_factory=dict)
    allowed_local_media_path: Annotated[
        str | None, Flag("Folder whose files requests may name as file:// images; without it none may.", metavar="FOLDER")
    ] = None
    allowed_media_domains: Annotated[
        tuple[str, ...],
        Flag(
            "Hosts that images may be fetched from, private addresses included; without it every public host and no private address.",
            metavar="HOST",
        ),
    ] = ()
    generation_config: Annotated[
        str,
        Flag(
            "Sampling settings of requests that bring none: `auto` is the checkpoint's generation_config.json, `vllm` or `none` the"
            " protocol's own, else a folder that holds such a file.",
            metavar="WHERE",
            section="Replies",
        ),
    ] = "auto"
    override_generation_config: Annotated[
        dict[str, Any], Flag('Sampling settings over those, such as {"temperature": 0.5}.', metavar="JSON")
    ] = field(default_factory=dict)
    chat_template: Annotated[str | None, Flag("File with a chat template, or the template itself, instead of the checkpoint's.")] = None
    chat_template_content_format: Annotated[
        Literal["auto", "string", "openai"],
        Flag("How messages reach the template: text joined, or as OpenAI's lists of parts; `auto` reads it off the template."),
    ] = "auto"
    default_chat_template_kwargs: Annotated[
        dict[str, Any], Flag('Template variables of every request, such as {"enable_thinking": false}.', metavar="JSON")
    ] = field(default_factory=dict)
    tool_call_parser: Annotated[
        str, Flag("How the model writes tool calls; `auto` reads it off the chat template, `none` turns tools off.", metavar="NAME")
    ] = "auto"
    reasoning_parser: Annotated[
        str, Flag("How the model marks reasoning; `auto` reads it off the chat template, `none` leaves it in the content.", metavar="NAME")
    ] = "auto"
    tool_parser_plugin: Annotated[
        str | None, Flag("Python file with further `Family` records, by whose names --tool-call-parser may choose.", metavar="FILE")
    ] = None
    reasoning_parser_plugin: Annotated[str | None, Flag("Likewise for --reasoning-parser.", metavar="FILE")] = None
    response_role: Annotated[str, Flag("Role of the answers to chat requests.")] = "assistant"
    trust_request_chat_template: Annotated[bool, Flag("Let requests bring their own chat template.")] = False
    return_tokens_as_token_ids: Annotated[bool, Flag("Name tokens in logprobs `token_id:N` instead of by their text.")] = False
    enable_force_include_usage: Annotated[bool, Flag("Send usage at the end of every stream, asked for or not.")] = False
    stream_interval: Annotated[int, Flag("Tokens of a stream that come together; the first comes at once. Requests may say another.")] = 1
    sse_keep_alive_interval: Annotated[
        float, Flag("Seconds of silence after which a comment goes into a stream, so that proxies keep it open; 0: none.")
    ] = 0.0
    max_logprobs: Annotated[
        int, Flag(f"Most likely tokens that a request may ask for at each place, up to {MAX_LOGPROBS}; -1 is that.", metavar="N")
    ] = MAX_LOGPROBS
    shutdown_timeout: Annotated[float, Flag("Seconds that running requests get to finish after SIGTERM.", section="Running it")] = 30.0
    enable_log_requests: Annotated[bool, Flag("Log each request's id, prompt and settings when it comes.")] = False
    enable_log_outputs: Annotated[bool, Flag("Log each answer: its request's id, text, tokens and how it ended.")] = False
    enable_log_deltas: Annotated[bool, Flag("With --enable-log-outputs, log the parts of streams too.")] = True
    max_log_len: Annotated[int | None, Flag("Most tokens and characters in such a line; all by default.")] = None
    enable_sleep_mode: Annotated[bool, Flag("Serve /sleep, /wake_up and /is_sleeping, with which the engine's memory is given back.")] = (
        False
    )
    disable_fastapi_docs: Annotated[bool, Flag("Do not serve /openapi.json.")] = False
    middleware: Annotated[
        tuple[str, ...],
        Flag(
            "ASGI middleware around all endpoints: the import path of a class, or of a coroutine function of request and call_next.",
            metavar="MODULE.NAME",
        ),
    ] = ()
    disable_access_log: Annotated[bool, Flag("Do not log a line for each request.", ("--disable-uvicorn-access-log",))] = False
    otlp_traces_endpoint: Annotated[
        str | None,
        Flag("Where a trace of each request is sent over OTLP: a URL with a path speaks HTTP, one without speaks gRPC.", metavar="URL"),
    ] = None
    log_level: Annotated[Literal["debug", "info", "warning", "error"], Flag("Least severe messages to log.", ("--uvicorn-log-level",))] = (
        "info"
    )

    log_format: Annotated[
        Literal["text", "json"], Flag("Lines for people, or a JSON object a line, with the id of the request that it is about.")
    ] = "text"

    def __post_init__(self) -> None:
        for name in (
            "served_model_name",
            "api_key",
            "allowed_origins",
            "allowed_methods",
            "allowed_headers",
            "allowed_media_domains",
            "middleware",
        ):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port={self.port} is no TCP port: it must be from 0 to 65535")
        if self.grpc_port is not None and not 0 <= self.grpc_port <= 65535:
            raise ConfigError(f"grpc_port={self.grpc_port} is no TCP port: it must be from 0 to 65535")
        for name in _LIMITS:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value} must be at least 1")
        object.__setattr__(self, "max_logprobs", MAX_LOGPROBS if self.max_logprobs == -1 else self.max_logprobs)
        if not 0 <= self.max_logprobs <= MAX_LOGPROBS:
            raise ConfigError(f"max_logprobs={self.max_logprobs} must be from 0 to {MAX_LOGPROBS}, or -1 for that")
        if self.max_stored_responses < 0:
            raise ConfigError(f"max_stored_responses={self.max_stored_responses} must not be negative")
        if self.request_timeout is not None and self.request_timeout <= 0:
            raise ConfigError(f"request_timeout={self.request_timeout} must be above 0")
        if self.sse_keep_alive_interval < 0:
            raise ConfigError(f"sse_keep_alive_interval={self.sse_keep_alive_interval} must not be negative")
        if self.shutdown_timeout < 0:
            raise ConfigError(f"shutdown_timeout={self.shutdown_timeout} must not be negative")
        if any(not key for key in self.api_key):
            raise ConfigError("api_key is empty: give a key, or leave the flag out to let everybody in")
        self._check_tls()
        self._check_media()

    def _check_media(self) -> None:
        for kind, most in self.limit_mm_per_prompt.items():
            if kind not in ("image", "video", "audio") or not isinstance(most, int) or most < 0:
                raise ConfigError(f'limit_mm_per_prompt={{"{kind}": {most!r}}} must be like {{"image": 4}}')
        if self.allowed_local_media_path is not None and not Path(self.allowed_local_media_path).is_dir():
            raise ConfigError(f"allowed_local_media_path={self.allowed_local_media_path!r} is no folder on this machine")

    def _check_tls(self) -> None:
        if self.ssl_cert_reqs not in (0, 1, 2):
            raise ConfigError(f"ssl_cert_reqs={self.ssl_cert_reqs} must be 0 (none), 1 (optional) or 2 (required)")
        if self.ssl_keyfile and not self.ssl_certfile:
            raise ConfigError("ssl_keyfile is given without ssl_certfile: HTTPS needs both")
        if self.ssl_cert_reqs and not self.ssl_ca_certs:
            raise ConfigError(f"ssl_cert_reqs={self.ssl_cert_reqs} checks client certificates, which needs ssl_ca_certs")

    @property
    def limits_keys(self) -> bool:
        """Whether each client's requests are counted."""
        return self.key_max_requests is not None or self.key_requests_per_minute is not None

    @property
    def url(self) -> str:
        """Where this machine reaches the server (for a Unix socket, the host part is a placeholder)."""
        scheme = "https" if self.ssl_certfile else "http"
        if self.uds:
            return f"{scheme}://localhost"
        return f"{scheme}://{self.reachable_host}:{self.port}"

    @property
    def reachable_host(self) -> str:
        """The host as this machine calls it, as it stands in URLs."""
        return {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(self.host, f"[{self.host}]" if ":" in self.host else self.host)
