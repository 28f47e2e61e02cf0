"""The service `pagoda.v1.Inference`: completions and embeddings in the proto file's words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import aclosing, contextmanager

import pagoda
from grpc.aio import ServicerContext
from pagoda.hal.errors import RequestError
from pagoda.serving.api.grpc import pagoda_pb2 as pb
from pagoda.serving.api.grpc.convert import completion_of, embedding_of, embedding_reply, logprobs_of, sequence_of, usage_of
from pagoda.serving.api.grpc.gate import Gate
from pagoda.serving.api.grpc.pagoda_pb2_grpc import InferenceServicer
from pagoda.serving.api.keys import CLIENT
from pagoda.serving.api.live_names import new_id
from pagoda.serving.api.openai.collect import UsageCount, collect
from pagoda.serving.api.openai.collect import usage_of as counted
from pagoda.serving.api.openai.prompts import prompt_ids
from pagoda.serving.api.openai.protocol import CompletionRequest
from pagoda.serving.api.openai.sampling import completion_settings, engine_request
from pagoda.serving.api.pooling.common import answers_of, input_requests, open_for
from pagoda.serving.api.pooling.vectors import embedding_params
from pagoda.serving.api.service import Service
from pagoda.serving.engine.logs import REQUEST
from pagoda.serving.engine.messages import EngineRequest


class Inference(InferenceServicer):
    """The methods. A call that is cancelled, or whose deadline passes, cancels the coroutine here, which ends its request in the engine."""

    def __init__(self, service: Service) -> None:
        self._service, self._gate = service, Gate(service)
        self._running: set[tuple[str, str]] = set()

    async def Generate(self, request: pb.GenerateRequest, context: ServicerContext) -> pb.GenerateResponse:
        return await self._gate.run(context, lambda client: self._generate(request, client))

    async def GenerateStream(self, request: pb.GenerateRequest, context: ServicerContext) -> None:
        await self._gate.run(context, lambda client: self._stream(request, client, context))

    async def Embed(self, request: pb.EmbedRequest, context: ServicerContext) -> pb.EmbedResponse:
        return await self._gate.run(context, lambda client: self._embed(request))

    async def Tokenize(self, request: pb.TokenizeRequest, context: ServicerContext) -> pb.TokenizeResponse:
        return await self._gate.run(context, lambda client: self._tokenize(request))

    async def Abort(self, request: pb.AbortRequest, context: ServicerContext) -> pb.AbortResponse:
        return await self._gate.run(context, lambda client: self._abort(request.request_ids), counted=False)

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: ServicerContext) -> pb.GetModelInfoResponse:
        return await self._gate.run(context, lambda client: self._model_info())

    async def _generate(self, request: pb.GenerateRequest, client: str) -> pb.GenerateResponse:
        body = completion_of(request, stream=False)
        made = await self._engine_request(body)
        with self._known(client, request.request_id):
            [group] = await collect(self._service, [made])
        return pb.GenerateResponse(
            request_id=request.request_id,
            model=self._service.check_model(body.model),
            sequences=[sequence_of(answer, answer.score) for answer in group.best(body.n or 1)],
            usage=usage_of(counted([group])),
            prompt_logprobs=logprobs_of(group.prompt_logprobs),
        )

    async def _stream(self, request: pb.GenerateRequest, client: str, context: ServicerContext) -> None:
        made = await self._engine_request(completion_of(request, stream=True))
        usage = UsageCount([made])
        with self._known(client, request.request_id):
            async with aclosing(self._service.generate(made)) as steps:
                async for step in steps:
                    usage.add(step)
                    chunk = pb.GenerateChunk(
                        request_id=request.request_id,
                        sequences=[sequence_of(delta, delta.cumulative_logprob) for delta in step.deltas],
                        usage=usage_of(usage.usage()),
                        prompt_logprobs=logprobs_of(step.prompt_logprobs or ()),
                    )
                    await context.write(chunk)

    async def _engine_request(self, body: CompletionRequest) -> EngineRequest:
        self._service.check_open()
        self._service.check_model(body.model)
        settings = completion_settings(body)
        [ids] = await prompt_ids(self._service, body)
        REQUEST.set(name := new_id("grpc", body.request_id))
        return engine_request(self._service, body, settings, ids, name)

    @contextmanager
    def _known(self, client: str, name: str) -> Iterator[None]:
        """No other call of this client has the same name while it runs, which `Abort` finds it by."""
        if not name:
            yield
            return
        if (client, name) in self._running:
            raise RequestError(f"request_id={name} is running already; give each request an id of its own", param="request_id")
        self._running.add((client, name))
        try:
            yield
        finally:
            self._running.discard((client, name))

    async def _embed(self, request: pb.EmbedRequest) -> pb.EmbedResponse:
        body = embedding_of(request)
        head = open_for(self._service, body, "embd", None)
        params = embedding_params(self._service, body)
        answers = await answers_of(self._service, await input_requests(self._service, body, params, head))
        embeddings = [embedding_reply(values) for values in answers.values]
        return pb.EmbedResponse(model=head.model, embeddings=embeddings, prompt_tokens=answers.usage.prompt_tokens)

    async def _tokenize(self, request: pb.TokenizeRequest) -> pb.TokenizeResponse:
        self._service.check_model(request.model or None)
        special = request.add_special_tokens if request.HasField("add_special_tokens") else True
        encode = self._service.text.tokenizer.encode
        return pb.TokenizeResponse(
            token_ids=await self._service.off_loop(len(request.text), encode, request.text, add_special_tokens=special)
        )

    async def _abort(self, names: Sequence[str]) -> pb.AbortResponse:
        return pb.AbortResponse(aborted=await self._service.desk.abort([*names], CLIENT.get()))

    async def _model_info(self) -> pb.GetModelInfoResponse:
        facts, tokenizer = self._service.client.facts, self._service.text.tokenizer
        return pb.GetModelInfoResponse(
            names=self._service.card.names,
            adapters=list(self._service.adapters),
            max_model_len=facts.max_model_len,
            vocab_size=facts.vocab_size,
            eos_token_ids=tokenizer.eos_ids,
            tasks=["generate"] if facts.pooling is None else facts.pooling.pooler.tasks,
            device=facts.device,
            server_version=pagoda.__version__,
        )
