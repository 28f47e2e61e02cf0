"""`LLM.embed`, `encode`, `classify`, `score` and `reward`: the SDK's calls to models that answer with vectors or scores."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, TypeVar

from pagoda.hal.errors import PagodaError, RequestError
from pagoda.serving.engine.messages import EngineRequest, FinishReason
from pagoda.serving.engine.pooling import PoolingParams, PoolingTask
from pagoda.serving.frontend.pooled import PooledPrompts
from pagoda.serving.frontend.pooled_outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PooledRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
    numbers,
)
from pagoda.serving.frontend.processor import Prompt
from pagoda.serving.frontend.scoring import Scorer
from pagoda.serving.frontend.session import Session
from pagoda.serving.loop_thread import LoopThread, Progress

T = TypeVar("T")
Prompts = Prompt | Sequence[Prompt]
Params = PoolingParams | Sequence[PoolingParams] | None


class PoolingCalls:
    """What `LLM` has of them. Raises `RequestError` for what the model does not do, before anything is sent."""

    _session: Session
    _thread: LoopThread

    def embed(
        self, prompts: Prompts, pooling_params: Params = None, *, truncate_prompt_tokens: int | None = None, use_tqdm: bool | None = None
    ) -> list[EmbeddingRequestOutput]:
        """A vector for each prompt, in order.

        Args:
            prompts: one, or a sequence: texts, lists of token ids, or mappings with "prompt" or "prompt_token_ids".
            pooling_params: for all, or one a prompt.
            truncate_prompt_tokens: longer prompts are cut; −1: to what the model takes.
        """
        found = self._pool(prompts, pooling_params, "embed", truncate_prompt_tokens, use_tqdm)
        return [_as(output, EmbeddingOutput(output.outputs.data.tolist())) for output in found]

    def classify(
        self, prompts: Prompts, pooling_params: Params = None, *, truncate_prompt_tokens: int | None = None, use_tqdm: bool | None = None
    ) -> list[ClassificationRequestOutput]:
        """A number for each label of each prompt."""
        labels = self.pooled_prompts.pooling.pooler.labels
        found = self._pool(prompts, pooling_params, "classify", truncate_prompt_tokens, use_tqdm)
        return [_as(output, ClassificationOutput(output.outputs.data.tolist(), labels)) for output in found]

    def encode(
        self,
        prompts: Prompts,
        pooling_params: Params = None,
        *,
        pooling_task: PoolingTask | None = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool | None = None,
    ) -> list[PoolingRequestOutput]:
        """What the model has to say of each prompt as plain numbers: of the whole, or of each token (`token_embed`, `token_classify`)."""
        return self._pool(prompts, pooling_params, pooling_task, truncate_prompt_tokens, use_tqdm)

    def reward(
        self, prompts: Prompts, pooling_params: Params = None, *, truncate_prompt_tokens: int | None = None, use_tqdm: bool | None = None
    ) -> list[PoolingRequestOutput]:
        """Of a reward model: the scores of each token, or of each step."""
        return self._pool(prompts, pooling_params, "token_classify", truncate_prompt_tokens, use_tqdm)

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        *,
        truncate_prompt_tokens: int | None = None,
        pooling_params: PoolingParams | None = None,
        use_tqdm: bool | None = None,
    ) -> list[ScoringRequestOutput]:
        """How well texts go together: one with each of several, or pair by pair.

        A cross-encoder reads both; vectors are compared by their cosine, a token's vectors by late interaction.
        """
        scorer = Scorer(self.pooled_prompts, truncate_prompt_tokens, pooling_params or PoolingParams())
        plan = scorer.plan(_texts(data_1), _texts(data_2))
        outputs = self._answers(plan.requests, use_tqdm)
        answers = {request.request_id: output for request, output in zip(plan.requests, outputs, strict=True)}
        return [
            PooledRequestOutput(pair.request_id, ScoringOutput(score), pair.prompt_token_ids)
            for pair, score in plan.scored({name: output.outputs.data for name, output in answers.items()})
        ]

    @property
    def pooled_prompts(self) -> PooledPrompts:
        """Makes requests of prompts."""
        processor = self._session.processor
        return PooledPrompts(processor.text, processor.facts)

    def _pool(
        self, prompts: Prompts, params: Params, task: PoolingTask | None, truncate: int | None, shown: bool | None
    ) -> list[PoolingRequestOutput]:
        maker, many = self.pooled_prompts, _listed(prompts)
        maker.pooling  # noqa: B018  the model's kind is the first thing to complain of
        each = [params] * len(many) if params is None or isinstance(params, PoolingParams) else list(params)
        if len(each) != len(many):
            raise RequestError(f"pooling_params holds {len(each)} settings for {len(many)} prompts; give one, or one for each")
        encoded = self._session.processor.encode_all(many)
        requests = [
            maker.request(maker.truncated(list(one.ids), truncate), replace(given or PoolingParams(), task=(given and given.task) or task))
            for one, given in zip(encoded, each, strict=True)
        ]
        return self._answers(requests, shown)

    def _answers(self, requests: Sequence[EngineRequest], shown: bool | None) -> list[PoolingRequestOutput]:
        self._check_open()
        return self._thread.run(_all(self._session, requests, Progress(len(requests), shown)))

    def _check_open(self) -> None:
        raise NotImplementedError


async def pooled(session: Session, request: EngineRequest) -> PoolingRequestOutput:
    """Send one request and wait for its answer. Raises `PagodaError` where the engine fails it."""
    async with aclosing(session.client.generate(request)) as deltas:  # type: ignore[type-var]
        async for delta in deltas:
            if any(part.finish_reason is FinishReason.ERROR for part in delta.sequences):
                raise PagodaError(f"request {delta.request_id} failed: {delta.error or 'the engine gave no reason'}")
            if delta.pooled is not None:
                output = PoolingOutput(numbers(delta.pooled))
                return PooledRequestOutput(request.request_id, output, list(request.prompt), delta.cached_tokens)
            if delta.finished:
                break
    raise PagodaError(f"request {request.request_id} was ended before its answer")


async def _all(session: Session, requests: Sequence[EngineRequest], progress: Progress) -> list[PoolingRequestOutput]:
    async def one(request: EngineRequest) -> PoolingRequestOutput:
        output = await pooled(session, request)
        progress.advance(len(request.prompt), 0)
        return output

    return await together([lambda request=request: one(request) for request in requests], progress.end)


async def together(calls: Sequence[Callable[[], Any]], end: Callable[[], None]) -> list[Any]:
    """All of them at once; one failure ends the others."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call()) for call in calls]
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    finally:
        end()
    return [task.result() for task in tasks]


def _as(output: PoolingRequestOutput, made: T) -> PooledRequestOutput[T]:
    return PooledRequestOutput(output.request_id, made, output.prompt_token_ids, output.num_cached_tokens)


def _listed(prompts: Prompts) -> list[Any]:
    if isinstance(prompts, str | dict) or (prompts and isinstance(prompts[0], int)):  # type: ignore[index]
        return [prompts]
    return list(prompts)  # type: ignore[arg-type]


def _texts(data: str | Sequence[str]) -> list[str]:
    return [data] if isinstance(data, str) else list(data)
