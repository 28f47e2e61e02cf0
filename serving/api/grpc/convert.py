"""Between the records of the proto file and those of the HTTP endpoints, field by field."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pagoda.hal.errors import RequestError
from pagoda.serving.api.body import converted
from pagoda.serving.api.grpc import pagoda_pb2 as pb
from pagoda.serving.api.openai.collect import Answer
from pagoda.serving.api.openai.protocol import CompletionRequest
from pagoda.serving.api.openai.replies import Usage
from pagoda.serving.api.pooling.common import Numbers
from pagoda.serving.api.pooling.protocol import EmbeddingRequest
from pagoda.serving.engine.messages import TokenLogprobs
from pagoda.serving.frontend.text_deltas import TextDelta


def completion_of(request: pb.GenerateRequest, *, stream: bool) -> CompletionRequest:
    """The same request for `/v1/completions`. Raises `RequestError` naming the field that is wrong."""
    fields = _set_fields(request, "prompt")
    fields |= _set_fields(request.sampling) | {"prompt": _prompt(request), "stream": stream}
    if request.HasField("structured_outputs"):
        fields["structured_outputs"] = _structured(request.structured_outputs)
    fields.pop("sampling", None)
    return converted(fields, CompletionRequest)


def embedding_of(request: pb.EmbedRequest) -> EmbeddingRequest:
    """The same request for `/v1/embeddings`."""
    fields = _set_fields(request) | {"input": [_prompt(one) for one in request.inputs]}
    fields.pop("inputs", None)
    return converted(fields, EmbeddingRequest)


def sequence_of(part: Answer | TextDelta, score: float | None) -> pb.Sequence:
    """A whole sequence, or what is new of one."""
    out = pb.Sequence(
        index=part.index,
        text=part.text,
        token_ids=part.token_ids,
        logprobs=logprobs_of(part.logprobs or ()),
        finish_reason=part.finish_reason or "",
        cumulative_logprob=score,
    )
    if isinstance(part.stop_reason, str):
        out.stop_string = part.stop_reason
    elif part.stop_reason is not None:
        out.stop_token_id = part.stop_reason
    return out


def logprobs_of(entries: Sequence[TokenLogprobs]) -> list[pb.TokenLogprobs]:
    return [
        pb.TokenLogprobs(
            token_id=entry.token_id,
            logprob=entry.logprob,
            rank=entry.rank,
            top=[pb.Logprob(token_id=one, logprob=value) for one, value in zip(entry.top_ids, entry.top_logprobs, strict=True)],
        )
        for entry in entries
    ]


def usage_of(usage: Usage) -> pb.Usage:
    details = usage.prompt_tokens_details
    cached = details.cached_tokens if details is not None else 0
    return pb.Usage(prompt_tokens=usage.prompt_tokens, completion_tokens=usage.completion_tokens, cached_tokens=cached)


def embedding_reply(values: Numbers) -> pb.Embedding:
    return pb.Embedding(values=values.ravel(), rows=values.shape[0] if values.ndim == 2 else 1)


def _set_fields(message: Any, *left_out: str) -> dict[str, Any]:
    """Scalars, lists and maps that are set, by name; texts that are empty are not."""
    return {field.name: _plain(value) for field, value in message.ListFields() if field.name not in left_out and not _is_message(field)}


def _is_message(field: Any) -> bool:
    return field.message_type is not None and not field.message_type.GetOptions().map_entry


def _plain(value: Any) -> Any:
    if isinstance(value, str | int | float | bool):
        return value
    return dict(value) if hasattr(value, "items") else list(value)


def _prompt(message: Any) -> str | list[int]:
    match message.WhichOneof("prompt"):
        case "text":
            return str(message.text)
        case "token_ids":
            return list(message.token_ids.ids)
    raise RequestError("prompt is missing; send text or token_ids", param="prompt", code="missing_field")


def _structured(message: pb.StructuredOutputs) -> dict[str, Any]:
    kind = message.WhichOneof("kind")
    if kind is None:
        raise RequestError("structured_outputs is empty; send one kind, or leave it out", param="structured_outputs")
    return {kind: list(message.choice.texts) if kind == "choice" else getattr(message, kind)}
