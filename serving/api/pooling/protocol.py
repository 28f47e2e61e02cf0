"""Requests and replies of the endpoints of pooling models, as typed records."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType
from pagoda.serving.api.openai.protocol import Int32, Name

Texts = str | Annotated[list[str], msgspec.Meta(min_length=1)]
Inputs = str | Annotated[list[str | int | list[int]], msgspec.Meta(min_length=1)]
"""A text, texts, token ids, or lists of token ids."""


class PoolingFields(msgspec.Struct, kw_only=True):
    """What all of them take."""

    model: str | None = None
    request_id: Name | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    priority: Int32 | None = 0
    cache_salt: Name | None = None
    use_activation: bool | None = None
    user: Any = None


class InputFields(PoolingFields, kw_only=True):
    """Of endpoints that read prompts one by one: `input`, or a conversation as `messages`."""

    input: Inputs | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = True
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = False
    continue_final_message: bool | None = False


class EmbeddingRequest(InputFields, kw_only=True):
    """`POST /v1/embeddings`. `normalize` is the same as `use_activation`."""

    encoding_format: Literal["float", "base64"] | None = "float"
    dimensions: int | None = None
    normalize: bool | None = None


class ClassifyRequest(InputFields, kw_only=True):
    """`POST /classify`."""

    activation: bool | None = None
    softmax: bool | None = None


class PoolRequest(EmbeddingRequest, kw_only=True):
    """`POST /pooling`: any task of the model."""

    task: Literal["embed", "classify", "token_embed", "token_classify"] | None = None
    activation: bool | None = None
    softmax: bool | None = None


class ScoreRequest(PoolingFields, kw_only=True):
    """`POST /score`: one text with several, or pair by pair. The names are those of vLLM, old and new."""

    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None
    items: Texts | None = None
    data_1: Texts | None = None
    data_2: Texts | None = None
    activation: bool | None = None


class RerankDocument(msgspec.Struct, kw_only=True):
    """A document as an object."""

    text: str


class RerankRequest(PoolingFields, kw_only=True):
    """`POST /rerank`, `/v1/rerank`, `/v2/rerank`: Jina's and Cohere's."""

    query: str
    documents: Annotated[list[str | RerankDocument], msgspec.Meta(min_length=1)]
    top_n: int | None = None
    return_documents: bool | None = True
    max_tokens_per_doc: int | None = None
    activation: bool | None = None


class PoolingUsage(msgspec.Struct, kw_only=True):
    """Tokens read for a reply."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingData(msgspec.Struct, kw_only=True):
    index: int
    embedding: list[float] | str
    object: str = "embedding"


class EmbeddingReply(msgspec.Struct, kw_only=True):
    id: str
    created: int
    model: str
    data: list[EmbeddingData]
    usage: PoolingUsage
    object: str = "list"


class PoolingData(msgspec.Struct, kw_only=True):
    index: int
    data: Any
    object: str = "pooling"


class PoolingReply(msgspec.Struct, kw_only=True):
    id: str
    created: int
    model: str
    data: list[PoolingData]
    usage: PoolingUsage
    object: str = "list"


class ClassifyData(msgspec.Struct, kw_only=True):
    index: int
    label: str | None
    probs: list[float]
    num_classes: int


class ClassifyReply(msgspec.Struct, kw_only=True):
    id: str
    created: int
    model: str
    data: list[ClassifyData]
    usage: PoolingUsage
    object: str = "list"


class ScoreData(msgspec.Struct, kw_only=True):
    index: int
    score: float
    object: str = "score"


class ScoreReply(msgspec.Struct, kw_only=True):
    id: str
    created: int
    model: str
    data: list[ScoreData]
    usage: PoolingUsage
    object: str = "list"


class RerankResult(msgspec.Struct, kw_only=True):
    index: int
    relevance_score: float
    document: RerankDocument | UnsetType = UNSET


class RerankReply(msgspec.Struct, kw_only=True):
    id: str
    model: str
    usage: PoolingUsage
    results: list[RerankResult]
    meta: dict[str, Any] | UnsetType = UNSET
