"""`POST /score` and `/rerank`: how well texts go together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from msgspec import UNSET
from pagoda.hal.errors import RequestError
from pagoda.serving.api.body import BodyReader
from pagoda.serving.api.live_names import engine_id
from pagoda.serving.api.openai.common import request_id
from pagoda.serving.api.pooling.common import Head, active, answers_of, open_for, prompts_of
from pagoda.serving.api.pooling.protocol import (
    PoolingFields,
    PoolingUsage,
    RerankDocument,
    RerankReply,
    RerankRequest,
    RerankResult,
    ScoreData,
    ScoreReply,
    ScoreRequest,
)
from pagoda.serving.api.service import Service
from pagoda.serving.api.stream import JsonReply
from pagoda.serving.engine.pooling import PoolingParams
from pagoda.serving.frontend.scoring import Scorer
from starlette.requests import Request
from starlette.responses import Response


class Scores:
    """The endpoints under all their names."""

    def __init__(self, service: Service, bodies: BodyReader) -> None:
        self._service, self._bodies = service, bodies

    async def score(self, request: Request) -> Response:
        body = await self._bodies.read(request, ScoreRequest)
        head = open_for(self._service, body, "score", request_id(request))
        first = _given("text_1", body.text_1, body.queries, body.data_1)
        second = _given("text_2", body.text_2, body.documents, body.items, body.data_2)
        return JsonReply(self._score(body, head, first, second))

    async def _score(self, body: ScoreRequest, head: Head, first: list[str], second: list[str]) -> ScoreReply:
        scores, usage = await self._scores(body, head, first, second, active(body.use_activation, body.activation))
        data = [ScoreData(index=index, score=score) for index, score in enumerate(scores)]
        return ScoreReply(**head._asdict(), data=data, usage=usage)

    async def rerank(self, request: Request) -> Response:
        """Jina's reply, and Cohere's first version, which agree."""
        body = await self._bodies.read(request, RerankRequest)
        head = open_for(self._service, body, "rerank", request_id(request))
        return JsonReply(self._rerank(body, head, cohere=request.url.path.startswith("/v2")))

    async def _rerank(self, body: RerankRequest, head: Head, cohere: bool) -> RerankReply:
        if body.top_n is not None and body.top_n < 0:
            raise RequestError(f"top_n={body.top_n} must be at least 1, or 0 for all", param="top_n")
        texts = [one if isinstance(one, str) else one.text for one in body.documents]
        read = await self._cut(texts, body.max_tokens_per_doc)
        scores, usage = await self._scores(body, head, [body.query], read, active(body.use_activation, body.activation))
        order = sorted(range(len(texts)), key=lambda index: -scores[index])[: body.top_n or None]
        shown = body.return_documents is not False and not cohere
        results = [
            RerankResult(index=index, relevance_score=scores[index], document=RerankDocument(text=texts[index]) if shown else UNSET)
            for index in order
        ]
        meta = {"api_version": {"version": "2"}, "billed_units": {"search_units": 1}} if cohere else UNSET
        return RerankReply(id=head.id, model=head.model, usage=usage, results=results, meta=meta)

    async def _cut(self, texts: list[str], most: int | None) -> list[str]:
        """Documents of at most so many tokens, as Cohere's field has it."""
        if most is None:
            return texts
        if most < 1:
            raise RequestError(f"max_tokens_per_doc={most} must be at least 1", param="max_tokens_per_doc")
        tokenizer = self._service.text.tokenizer

        def cut() -> list[str]:
            ids = tokenizer.encode_batch(texts, add_special_tokens=False)
            return [text if len(one) <= most else tokenizer.decode(one[:most]) for text, one in zip(texts, ids, strict=True)]

        return await self._service.off_loop(sum(map(len, texts)), cut)

    async def _scores(
        self, body: PoolingFields, head: Head, first: list[str], second: list[str], active: bool | None
    ) -> tuple[list[float], PoolingUsage]:
        if len(second) > self._service.config.max_prompts:
            raise RequestError(
                f"{len(second)} texts are to be scored, the limit of --max-prompts is {self._service.config.max_prompts}",
                param="documents",
            )
        if body.truncate_prompt_tokens is None:
            self._service.check_size(max(map(len, (*first, *second))))
        scorer = Scorer(prompts_of(self._service), body.truncate_prompt_tokens, PoolingParams(use_activation=active))
        size = sum(map(len, first)) + sum(map(len, second))
        plan = await self._service.off_loop(size, scorer.plan, first, second, engine_id(head.id))
        fields = {"priority": body.priority or 0, "cache_salt": body.cache_salt, "adapter": self._service.adapter_of(body.model)}
        answers = await answers_of(self._service, [replace(request, **fields) for request in plan.requests])  # type: ignore[arg-type]
        named = {request.request_id: values for request, values in zip(plan.requests, answers.values, strict=True)}
        return [score for _, score in plan.scored(named)], answers.usage


def _given(name: str, *values: str | Sequence[str] | None) -> list[str]:
    found = next((value for value in values if value is not None), None)
    if found is None:
        raise RequestError(f"{name} is missing; it is required", param=name, code="missing_field")
    return [found] if isinstance(found, str) else list(found)
