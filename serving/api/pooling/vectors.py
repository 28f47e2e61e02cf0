"""`POST /v1/embeddings`, `/classify` and `/pooling`."""

from __future__ import annotations

import base64

from pagoda.serving.api.body import BodyReader
from pagoda.serving.api.openai.common import request_id
from pagoda.serving.api.pooling.common import Head, Numbers, active, answers_of, input_requests, open_for, prompts_of
from pagoda.serving.api.pooling.protocol import (
    ClassifyData,
    ClassifyReply,
    ClassifyRequest,
    EmbeddingData,
    EmbeddingReply,
    EmbeddingRequest,
    PoolingData,
    PoolingReply,
    PoolRequest,
)
from pagoda.serving.api.service import Service
from pagoda.serving.api.stream import JsonReply
from pagoda.serving.engine.pooling import PoolingParams, PoolingTask
from starlette.requests import Request
from starlette.responses import Response


class Vectors:
    """The three endpoints."""

    def __init__(self, service: Service, bodies: BodyReader) -> None:
        self._service, self._bodies = service, bodies

    async def embeddings(self, request: Request) -> Response:
        body = await self._bodies.read(request, EmbeddingRequest)
        head = open_for(self._service, body, "embd", request_id(request))
        return JsonReply(self._embeddings(body, embedding_params(self._service, body), head))

    async def _embeddings(self, body: EmbeddingRequest, params: PoolingParams, head: Head) -> EmbeddingReply:
        answers = await answers_of(self._service, await input_requests(self._service, body, params, head))
        data = [EmbeddingData(index=index, embedding=_encoded(values, body.encoding_format)) for index, values in enumerate(answers.values)]
        return EmbeddingReply(**head._asdict(), data=data, usage=answers.usage)

    async def classify(self, request: Request) -> Response:
        body = await self._bodies.read(request, ClassifyRequest)
        head = open_for(self._service, body, "classify", request_id(request))
        params = PoolingParams("classify", active(body.use_activation, body.activation, body.softmax))
        return JsonReply(self._classify(body, params, head))

    async def _classify(self, body: ClassifyRequest, params: PoolingParams, head: Head) -> ClassifyReply:
        answers = await answers_of(self._service, await input_requests(self._service, body, params, head))
        labels = prompts_of(self._service).pooling.pooler.labels
        data = [_classified(index, values, labels) for index, values in enumerate(answers.values)]
        return ClassifyReply(**head._asdict(), data=data, usage=answers.usage)

    async def pooling(self, request: Request) -> Response:
        body = await self._bodies.read(request, PoolRequest)
        head = open_for(self._service, body, "pool", request_id(request))
        raw = active(body.use_activation, body.normalize, body.activation, body.softmax)
        return JsonReply(self._pooling(body, PoolingParams(body.task, raw, body.dimensions), head))

    async def _pooling(self, body: PoolRequest, params: PoolingParams, head: Head) -> PoolingReply:
        answers = await answers_of(self._service, await input_requests(self._service, body, params, head))
        data = [PoolingData(index=index, data=_encoded(values, body.encoding_format)) for index, values in enumerate(answers.values)]
        return PoolingReply(**head._asdict(), data=data, usage=answers.usage)


def embedding_params(service: Service, body: EmbeddingRequest) -> PoolingParams:
    """A model of vectors for each token gives those, as vLLM's endpoint does."""
    pooler = prompts_of(service).pooling.pooler
    task: PoolingTask = "token_embed" if pooler.task == "embed" and pooler.kind == "all" else "embed"
    return PoolingParams(task, active(body.use_activation, body.normalize), body.dimensions)


def _encoded(values: Numbers, encoding: str | None) -> list[float] | str:
    return base64.b64encode(values.astype("<f4").tobytes()).decode() if encoding == "base64" else values.tolist()


def _classified(index: int, values: Numbers, labels: tuple[str, ...]) -> ClassifyData:
    best = int(values.argmax())
    return ClassifyData(index=index, label=labels[best] if labels else None, probs=values.tolist(), num_classes=len(values))
