"""Every operation of the HTTP API in one table: path, method, and the records that it reads and writes."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
from pagoda.serving.api.aborts import Aborted, AbortRequest
from pagoda.serving.api.adapters import LoadRequest, UnloadRequest
from pagoda.serving.api.anthropic.protocol import CountRequest, MessagesRequest
from pagoda.serving.api.anthropic.replies import Message, ModelInfo, ModelPage, TokenCount
from pagoda.serving.api.audio.form import AudioRequest
from pagoda.serving.api.audio.replies import Transcription, VerboseTranscription
from pagoda.serving.api.openai.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from pagoda.serving.api.openai.replies import ChatCompletion, Completion, ModelEntry, ModelList, TokenizeReply
from pagoda.serving.api.openai.responses_protocol import ResponseRequest
from pagoda.serving.api.openai.responses_replies import Deleted, InputTokens, ItemList, ResponseRecord
from pagoda.serving.api.pooling.protocol import (
    ClassifyReply,
    ClassifyRequest,
    EmbeddingReply,
    EmbeddingRequest,
    PoolingReply,
    PoolRequest,
    RerankReply,
    RerankRequest,
    ScoreReply,
    ScoreRequest,
)
from pagoda.serving.api.profiling import Traces
from pagoda.serving.api.scale_out import GenerateRequest, Reply

JSON, TEXT, FORM, EVENTS = "application/json", "text/plain", "multipart/form-data", "text/event-stream"


class Text(msgspec.Struct, kw_only=True):
    """Reply to `/detokenize`."""

    prompt: str


class Operation(NamedTuple):
    """`asks`: the record of the body; `gives`: that of the reply or several, `{}` of any JSON, None where `media` alone says what comes."""

    path: str
    method: str
    summary: str
    asks: type[msgspec.Struct] | None = None
    gives: Any = None
    media: str = JSON
    streams: bool = False
    sent_as: str = JSON
    query: tuple[str, ...] = ()

    @property
    def replies(self) -> tuple[Any, ...]:
        """Records that a reply may be; none of any JSON."""
        return self.gives if isinstance(self.gives, tuple) else (self.gives,) if self.gives else ()

    @property
    def name(self) -> str:
        """An identifier of its own."""
        words = self.path.replace("{", "").replace("}", "").replace("/", "_").strip("_")
        return f"{self.method.lower()}_{words or 'page'}"


_ONE = "/v1/responses/{response_id}"
_AUDIO = (Transcription, VerboseTranscription)

OPERATIONS: tuple[Operation, ...] = (
    Operation("/v1/completions", "POST", "Go on from a text", CompletionRequest, Completion, streams=True),
    Operation("/v1/chat/completions", "POST", "Answer a chat", ChatRequest, ChatCompletion, streams=True),
    Operation("/v1/responses", "POST", "Make a response", ResponseRequest, ResponseRecord, streams=True),
    Operation("/v1/responses/input_tokens", "POST", "Count the tokens of a response's input", ResponseRequest, InputTokens),
    Operation(
        _ONE, "GET", "Look a response up, or follow its events", gives=ResponseRecord, streams=True, query=("stream", "starting_after")
    ),
    Operation(_ONE, "DELETE", "Forget a response", gives=Deleted),
    Operation(_ONE + "/cancel", "POST", "Cancel a response in the background", gives=ResponseRecord),
    Operation(_ONE + "/input_items", "GET", "List what a response was given", gives=ItemList, query=("order", "after", "limit")),
    Operation("/v1/messages", "POST", "Answer in Anthropic's protocol", MessagesRequest, Message, streams=True),
    Operation("/v1/messages/count_tokens", "POST", "Count a prompt's tokens", CountRequest, TokenCount),
    Operation("/v1/models", "GET", "List names and adapters", gives=(ModelList, ModelPage)),
    Operation("/v1/models/{name}", "GET", "Look a name up", gives=(ModelEntry, ModelInfo)),
    Operation("/v1/load_lora_adapter", "POST", "Load an adapter", LoadRequest, media=TEXT),
    Operation("/v1/unload_lora_adapter", "POST", "Unload an adapter", UnloadRequest, media=TEXT),
    Operation("/tokenize", "POST", "Ids of a text or a chat", TokenizeRequest, TokenizeReply),
    Operation("/detokenize", "POST", "Text of ids", DetokenizeRequest, Text),
    Operation("/v1/embeddings", "POST", "Vectors of texts", EmbeddingRequest, EmbeddingReply),
    Operation("/classify", "POST", "Classes of texts", ClassifyRequest, ClassifyReply),
    Operation("/pooling", "POST", "What a pooling model gives", PoolRequest, PoolingReply),
    *(Operation(path, "POST", "Score pairs of texts", ScoreRequest, ScoreReply) for path in ("/score", "/v1/score")),
    *(Operation(path, "POST", "Rank documents", RerankRequest, RerankReply) for path in ("/rerank", "/v1/rerank", "/v2/rerank")),
    Operation("/inference/v1/generate", "POST", "Token ids in, token ids out", GenerateRequest, Reply, streams=True),
    Operation("/inference/v1/abort_requests", "POST", "End requests by their ids", AbortRequest, Aborted),
    Operation("/abort_requests", "POST", "End requests by their ids, or all", AbortRequest, Aborted),
    Operation("/v1/completions/render", "POST", "The requests that a completion is", CompletionRequest, list[GenerateRequest]),
    Operation("/v1/chat/completions/render", "POST", "The request that a chat is", ChatRequest, GenerateRequest),
    Operation("/v1/responses/render", "POST", "The request that a response is", ResponseRequest, GenerateRequest),
    Operation("/v1/messages/render", "POST", "The request that a message is", MessagesRequest, GenerateRequest),
    *(
        Operation(f"/v1/audio/{what}", "POST", "Text of speech", AudioRequest, _AUDIO, streams=True, sent_as=FORM)
        for what in ("transcriptions", "translations")
    ),
    Operation("/", "GET", "The page", media="text/html"),
    *(Operation(path, "GET", "Whether requests are taken", media="") for path in ("/health", "/ready", "/live", "/ping")),
    Operation("/ping", "POST", "Whether requests are taken", media=""),
    *(Operation(path, "GET", "Of the server", gives={}) for path in ("/version", "/load", "/stats", "/server_info", "/openapi.json")),
    Operation("/tokenizer_info", "GET", "Special tokens and chat template", gives={}),
    Operation("/metrics", "GET", "Prometheus metrics", media=TEXT),
    Operation("/reset_prefix_cache", "POST", "Forget cached prefixes", gives={}),
    Operation("/start_profile", "POST", "Trace the engine's steps from now on", media=""),
    Operation("/stop_profile", "POST", "End the trace", gives=Traces),
    Operation("/sleep", "POST", "Give the engine's memory back", media="", query=("level",)),
    Operation("/wake_up", "POST", "Take the engine's memory again", media="", query=("tags",)),
    Operation("/is_sleeping", "GET", "Whether the engine sleeps", gives={}),
)
"""What `app.py` mounts, as its document tells it."""
