"""The gRPC service over the toy engine, through a real channel."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from pagoda.hal.errors import ConfigError
from pagoda.serving.api.address import bind, bind_grpc
from pagoda.serving.api.config import ServerConfig
from pagoda.serving.api.grpc import pagoda_pb2 as pb
from pagoda.serving.api.grpc.pagoda_pb2_grpc import InferenceStub
from pagoda.serving.api.grpc.server import INFERENCE, GrpcServer
from pagoda.serving.api.service import ModelCard, Service
from patience import eventually
from toy_engine import BOS, EOS, ToyEngine, toy_text


class Toy:
    def __init__(self, engine: ToyEngine, service: Service, server: GrpcServer, channel: grpc.aio.Channel, where: str) -> None:
        self.engine, self.service, self.server, self.channel, self.where = engine, service, server, channel, where
        self.stub = InferenceStub(channel)

    async def idle(self) -> None:
        await eventually(lambda: not self.engine.live and not self.service.load)


@asynccontextmanager
async def toy_grpc(engine: ToyEngine | None = None, **flags: Any) -> AsyncIterator[Toy]:
    config = ServerConfig(host="127.0.0.1", grpc_port=0, **flags)
    engine = engine or ToyEngine()
    service = Service(engine, toy_text(), ModelCard(("toy", "alias"), "toy-root"), config)
    sock = bind_grpc(config)
    assert sock is not None
    where = f"127.0.0.1:{sock.getsockname()[1]}"
    server = GrpcServer(service, sock)
    await server.start()
    try:
        async with grpc.aio.insecure_channel(where) as channel:
            yield Toy(engine, service, server, channel, where)
    finally:
        await server.stop(0)
        service.close()


def text(prompt: str, **sampling: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(text=prompt, sampling=pb.SamplingParams(**sampling))


async def failure(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    return raised.value


async def test_a_whole_answer_with_logprobs_and_usage() -> None:
    async with toy_grpc() as toy:
        reply = await toy.stub.Generate(text("hello", logprobs=2, prompt_logprobs=1, n=2))
        assert reply.model == "toy"
        first, second = reply.sequences
        assert (first.text, second.text) == ("hello", "hello")
        assert (first.index, first.finish_reason, list(first.token_ids)) == (0, "stop", [BOS, *b"hello", EOS])
        assert [one.token_id for one in first.logprobs] == list(first.token_ids)
        assert [len(one.top) for one in first.logprobs] == [2] * 7
        assert [one.token_id for one in reply.prompt_logprobs] == list(b"hello")
        assert (reply.usage.prompt_tokens, reply.usage.completion_tokens, reply.usage.cached_tokens) == (6, 14, 3)


async def test_a_stream_gives_the_whole_answer_in_pieces() -> None:
    async with toy_grpc() as toy:
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=list(b"abcdef")), request_id="mine")
        chunks = [chunk async for chunk in toy.stub.GenerateStream(request)]
        whole = await toy.stub.Generate(request)
        parts = [part for chunk in chunks for part in chunk.sequences]
        assert len(chunks) > 3 and {chunk.request_id for chunk in chunks} == {"mine"}
        assert "".join(part.text for part in parts) == whole.sequences[0].text == "abcdef"
        assert [token for part in parts for token in part.token_ids] == list(whole.sequences[0].token_ids)
        assert parts[-1].finish_reason == "stop" and chunks[-1].usage == whole.usage


async def test_fields_mean_what_they_mean_over_http() -> None:
    async with toy_grpc() as toy:
        request = text("abcdef", max_tokens=4, min_tokens=1, temperature=0.5, top_k=3, seed=-7, stop=["d"], logit_bias={5: -300.0})
        request.priority, request.cache_salt, request.add_special_tokens = -2, "salt", False
        reply = await toy.stub.Generate(request)
        made = toy.engine.requests[-1]
        assert (made.prompt, made.priority, made.cache_salt) == (tuple(b"abcdef"), -2, "salt")
        params = made.params
        assert (params.max_tokens, params.min_tokens, params.temperature, params.top_k, params.seed) == (4, 1, 0.5, 3, -7)
        assert params.logit_bias == {5: -100.0}
        assert (reply.sequences[0].text, reply.sequences[0].stop_string) == ("abc", "d")
        reply = await toy.stub.Generate(text("abc", stop_token_ids=[98]))
        assert reply.sequences[0].stop_token_id == 98
        await toy.stub.Generate(pb.GenerateRequest(text="a", structured_outputs=pb.StructuredOutputs(choice=pb.Choices(texts=["a", "b"]))))
        wanted = toy.engine.requests[-1].params.structured_outputs
        assert wanted is not None and wanted.choice == ("a", "b")


@pytest.mark.parametrize(
    ("request_", "status", "says", "param"),
    [
        (pb.GenerateRequest(), grpc.StatusCode.INVALID_ARGUMENT, "prompt is missing", "prompt"),
        (text("a", temperature=-1.0), grpc.StatusCode.INVALID_ARGUMENT, "temperature=-1.0", "temperature"),
        (text("a", max_tokens=5000), grpc.StatusCode.INVALID_ARGUMENT, "max_tokens=5000", "max_tokens"),
        (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[9999])), grpc.StatusCode.INVALID_ARGUMENT, "9999", "prompt"),
        (pb.GenerateRequest(text="a", model="other"), grpc.StatusCode.NOT_FOUND, "'other' is not served", "model"),
        (
            pb.GenerateRequest(text="a", structured_outputs=pb.StructuredOutputs()),
            grpc.StatusCode.INVALID_ARGUMENT,
            "structured_outputs is empty",
            "structured_outputs",
        ),
    ],
)
async def test_errors_are_statuses_that_name_the_field(request_: Any, status: grpc.StatusCode, says: str, param: str) -> None:
    async with toy_grpc() as toy:
        error = await failure(toy.stub.Generate(request_))
        assert error.code() is status and says in error.details()
        assert dict(error.trailing_metadata())["param"] == param
        streamed = toy.stub.GenerateStream(request_)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await streamed.read()
        assert raised.value.code() is status


async def test_a_dead_engine_is_unavailable() -> None:
    engine = ToyEngine()
    async with toy_grpc(engine) as toy:
        engine.dead = "it was killed"
        error = await failure(toy.stub.Generate(text("a")))
        assert error.code() is grpc.StatusCode.UNAVAILABLE and "it was killed" in error.details()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_deadline_that_passes_ends_the_request_in_the_engine(stream: bool) -> None:
    async with toy_grpc(ToyEngine(held=3)) as toy:
        request, seconds = text("abc", max_tokens=4000, ignore_eos=True), 0.1
        while not toy.engine.requests:  # on a slow machine the deadline may pass before the engine has heard of it
            seconds *= 2
            if stream:
                call = toy.stub.GenerateStream(request, timeout=seconds)
                with pytest.raises(grpc.aio.AioRpcError) as raised:
                    [chunk async for chunk in call]
                error = raised.value
            else:
                error = await failure(toy.stub.Generate(request, timeout=seconds))
            assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await eventually(lambda: len(toy.engine.aborted) == len(toy.engine.requests))
        await toy.idle()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_cancelled_call_ends_the_request_in_the_engine(stream: bool) -> None:
    async with toy_grpc(ToyEngine(held=9)) as toy:
        request = text("abc", max_tokens=4000, ignore_eos=True)
        call = toy.stub.GenerateStream(request) if stream else toy.stub.Generate(request)
        if stream:
            await call.read()
        while not toy.engine.live:
            await asyncio.sleep(0.01)
        call.cancel()
        await toy.idle()
        assert len(toy.engine.aborted) == 1


async def test_abort_ends_a_request_by_the_id_it_brought() -> None:
    async with toy_grpc(ToyEngine(held=9)) as toy:
        request = text("abc", max_tokens=4000, ignore_eos=True)
        request.request_id = "long"
        running = asyncio.ensure_future(toy.stub.Generate(request))
        while not toy.engine.live:
            await asyncio.sleep(0.01)
        twice = await failure(toy.stub.Generate(request))
        assert twice.code() is grpc.StatusCode.INVALID_ARGUMENT and "request_id=long" in twice.details()
        reply = await toy.stub.Abort(pb.AbortRequest(request_ids=["long", "unknown", "long"]))
        assert list(reply.aborted) == ["long"]
        assert (await running).sequences[0].finish_reason == "abort"
        assert list((await toy.stub.Abort(pb.AbortRequest(request_ids=["long"]))).aborted) == []


async def test_keys_and_their_limits_hold_here_too() -> None:
    async with toy_grpc(ToyEngine(held=9), api_key=("one", "two"), key_max_requests=1) as toy:
        error = await failure(toy.stub.Generate(text("a")))
        assert error.code() is grpc.StatusCode.UNAUTHENTICATED
        error = await failure(toy.stub.GetModelInfo(pb.GetModelInfoRequest(), metadata=[("authorization", "Bearer three")]))
        assert error.code() is grpc.StatusCode.UNAUTHENTICATED
        one, two = [("authorization", "Bearer one")], [("x-api-key", "two")]
        slow = text("abc", max_tokens=4000, ignore_eos=True)
        slow.request_id = "mine"
        running = asyncio.ensure_future(toy.stub.Generate(slow, metadata=one))
        while not toy.engine.live:
            await asyncio.sleep(0.01)
        error = await failure(toy.stub.Generate(text("a"), metadata=one))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert dict(error.trailing_metadata())["retry-after"] == "1"
        # another client cannot end it
        assert list((await toy.stub.Abort(pb.AbortRequest(request_ids=["mine"]), metadata=two)).aborted) == []
        assert list((await toy.stub.Abort(pb.AbortRequest(request_ids=["mine"]), metadata=one)).aborted) == ["mine"]
        assert (await running).sequences[0].finish_reason == "abort"


async def test_tokenize_and_the_models_facts() -> None:
    async with toy_grpc() as toy:
        assert list((await toy.stub.Tokenize(pb.TokenizeRequest(text="ab"))).token_ids) == [BOS, *b"ab"]
        assert list((await toy.stub.Tokenize(pb.TokenizeRequest(text="ab", add_special_tokens=False))).token_ids) == list(b"ab")
        info = await toy.stub.GetModelInfo(pb.GetModelInfoRequest())
        assert list(info.names) == ["toy", "alias"] and list(info.tasks) == ["generate"]
        assert (info.max_model_len, info.vocab_size, list(info.eos_token_ids), info.device) == (4096, 258, [EOS], "toy")
        error = await failure(toy.stub.Embed(pb.EmbedRequest(inputs=[pb.EmbedInput(text="a")])))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT and "generates text" in error.details()


async def test_health_says_when_the_server_drains() -> None:
    async with toy_grpc() as toy:
        health = health_pb2_grpc.HealthStub(toy.channel)
        for name in ("", INFERENCE):
            assert (await health.Check(health_pb2.HealthCheckRequest(service=name))).status == health_pb2.HealthCheckResponse.SERVING
        watched = health.Watch(health_pb2.HealthCheckRequest())
        assert (await watched.read()).status == health_pb2.HealthCheckResponse.SERVING
        toy.service.draining = True
        await toy.server.refuse()
        assert (await watched.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        watched.cancel()
        error = await failure(toy.stub.Generate(text("a")))
        assert error.code() is grpc.StatusCode.UNAVAILABLE and "shutting down" in error.details()


async def test_reflection_tells_the_methods() -> None:
    def methods(where: str) -> list[str]:
        with grpc.insecure_channel(where) as channel:
            database = ProtoReflectionDescriptorDatabase(channel)
            assert {INFERENCE, "grpc.health.v1.Health"} <= set(database.get_services())
            return [method.name for method in DescriptorPool(database).FindServiceByName(INFERENCE).methods]

    async with toy_grpc() as toy:
        found = await asyncio.to_thread(methods, toy.where)
        assert found == ["Generate", "GenerateStream", "Embed", "Tokenize", "Abort", "GetModelInfo"]


async def test_a_request_above_the_limit_is_refused() -> None:
    async with toy_grpc(max_request_bytes=1000) as toy:
        error = await failure(toy.stub.Generate(text("a" * 2000)))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_a_port_that_is_taken_is_an_error_before_anything_loads() -> None:
    with bind(ServerConfig(host="127.0.0.1", port=0)) as taken:
        taken.listen()
        with pytest.raises(ConfigError, match="--grpc-port"):
            bind_grpc(ServerConfig(host="127.0.0.1", grpc_port=taken.getsockname()[1]))
    first = bind_grpc(ServerConfig(host="127.0.0.1", grpc_port=0))
    assert first is not None
    with first, pytest.raises(ConfigError, match="--grpc-port"):  # though it would be shared
        bind_grpc(ServerConfig(host="127.0.0.1", grpc_port=first.getsockname()[1]))
    assert bind_grpc(ServerConfig()) is None
    with pytest.raises(ConfigError, match="grpc_port=70000"):
        ServerConfig(grpc_port=70000)
