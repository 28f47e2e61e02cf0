"""gRPC on a server process: TLS and drain over the toy engine, and the default model, whose answers are those over HTTP."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from pagoda.serving.api.grpc import pagoda_pb2 as pb
from pagoda.serving.api.grpc.pagoda_pb2_grpc import InferenceStub
from patience import LIMIT_S, until
from toy_process import ServerProcess


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    key, cert = str(folder / "key.pem"), str(folder / "cert.pem")
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
    subprocess.run([*command.split(), "-keyout", key, "-out", cert], check=True, capture_output=True)
    return key, cert


def secure(where, cert, *pair):
    return grpc.secure_channel(where, grpc.ssl_channel_credentials(Path(cert).read_bytes(), *(Path(one).read_bytes() for one in pair)))


def test_tls_and_client_certificates(certificate):
    key, cert = certificate
    with ServerProcess.toy(grpc_port=0, ssl_keyfile=key, ssl_certfile=cert, ssl_ca_certs=cert, ssl_cert_reqs=2) as server:
        with secure(server.grpc, cert, key, cert) as channel:
            assert InferenceStub(channel).Generate(pb.GenerateRequest(text="ab"), timeout=LIMIT_S).sequences[0].text == "ab"
        for without in (secure(server.grpc, cert), grpc.insecure_channel(server.grpc)):
            with without, pytest.raises(grpc.RpcError) as raised:
                InferenceStub(without).Generate(pb.GenerateRequest(text="ab"), timeout=LIMIT_S)
            assert raised.value.code() is grpc.StatusCode.UNAVAILABLE


def test_a_drain_lets_calls_finish_and_tells_probes():
    with ServerProcess.toy(held=9, grpc_port=0, shutdown_timeout=LIMIT_S) as server, grpc.insecure_channel(server.grpc) as channel:
        stub, health = InferenceStub(channel), health_pb2_grpc.HealthStub(channel)
        request = pb.GenerateRequest(text="abc", sampling=pb.SamplingParams(max_tokens=60, ignore_eos=True))
        running = stub.GenerateStream(request)
        chunks = [next(running)]
        server.signal(signal.SIGTERM)
        until(lambda: health.Check(health_pb2.HealthCheckRequest()).status == health_pb2.HealthCheckResponse.NOT_SERVING)
        with pytest.raises(grpc.RpcError) as raised:
            stub.Generate(pb.GenerateRequest(text="a"))
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        server.go_on()
        chunks += running
        assert chunks[-1].usage.completion_tokens == 60
        assert server.wait() == 0


def test_calls_that_outlast_the_drain_are_aborted():
    with ServerProcess.toy(held=9, grpc_port=0, shutdown_timeout=0.3) as server, grpc.insecure_channel(server.grpc) as channel:
        request = pb.GenerateRequest(text="abc", sampling=pb.SamplingParams(max_tokens=4000, ignore_eos=True))
        running = InferenceStub(channel).GenerateStream(request)
        next(running)
        server.signal(signal.SIGTERM)
        assert list(running)[-1].sequences[0].finish_reason == "abort"
        assert server.wait() == 0


def test_the_default_models_tokens_are_those_over_http(server, model):
    fields = {"prompt": "Once upon a time", "max_tokens": 12, "temperature": 0, "logprobs": 2}
    over_http = httpx.post(f"{server.where}/v1/completions", json={**fields, "model": model, "return_token_ids": True}, timeout=60).json()[
        "choices"
    ][0]
    request = pb.GenerateRequest(text=fields["prompt"], sampling=pb.SamplingParams(max_tokens=12, temperature=0, logprobs=2))
    with grpc.insecure_channel(server.grpc) as channel:
        stub = InferenceStub(channel)
        ids = stub.Tokenize(pb.TokenizeRequest(text=fields["prompt"])).token_ids
        assert list(ids) == over_http["prompt_token_ids"]
        whole = stub.Generate(request, timeout=60)
        by_ids = stub.Generate(pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids), sampling=request.sampling), timeout=60)
        parts = [part for chunk in stub.GenerateStream(request, timeout=60) for part in chunk.sequences]
        info = stub.GetModelInfo(pb.GetModelInfoRequest())
    assert list(whole.sequences[0].token_ids) == over_http["token_ids"] == list(by_ids.sequences[0].token_ids)
    assert [token for part in parts for token in part.token_ids] == over_http["token_ids"]
    assert "".join(part.text for part in parts) == whole.sequences[0].text == over_http["text"]
    assert whole.sequences[0].finish_reason == "length"
    assert [one.logprob for one in whole.sequences[0].logprobs] == pytest.approx(over_http["logprobs"]["token_logprobs"], abs=1e-4)
    assert (info.names[0], info.max_model_len) == (model, 2048)


def test_the_guides_program(server):
    guide = (Path(__file__).parents[2] / "docs/guide/grpc.md").read_text()
    [program] = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-c", program.replace("127.0.0.1:50051", server.grpc)], capture_output=True, text=True, timeout=60, check=False
    )
    # One answer as a whole, one in pieces (how many depends on who reads how soon), tokens.
    assert done.returncode == 0 and len(done.stdout.splitlines()) >= 3, done.stderr


def test_deadlines_and_cancelled_calls_reach_the_real_engine(server):
    request = pb.GenerateRequest(text="Count:", sampling=pb.SamplingParams(max_tokens=1500, ignore_eos=True), request_id="counting")

    def stats():
        return httpx.get(f"{server.where}/stats").json()

    def idle():
        until(lambda: not stats()["running"] and not stats()["waiting"], "for the request's end")

    with grpc.insecure_channel(server.grpc) as channel:
        stub = InferenceStub(channel)
        with pytest.raises(grpc.RpcError) as raised:
            stub.Generate(request, timeout=1.0)
        assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        idle()
        running = stub.GenerateStream(request)
        next(running)
        assert stats()["running"] == 1
        running.cancel()
        idle()
        running = stub.GenerateStream(request)
        next(running)
        stub.Abort(pb.AbortRequest(request_ids=["counting"]))
        assert list(running)[-1].sequences[0].finish_reason == "abort"
        idle()
