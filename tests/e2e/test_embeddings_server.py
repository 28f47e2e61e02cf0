"""`pagoda serve` with all-MiniLM-L6-v2: OpenAI's client, and the other endpoints of models that pool."""

import base64
import json
import subprocess
from pathlib import Path

import grpc
import httpx
import minilm
import numpy as np
import openai
import pytest
from openai_document import checker
from pagoda.serving.api.grpc import pagoda_pb2 as pb
from pagoda.serving.api.grpc.pagoda_pb2_grpc import InferenceStub
from toy_process import SERVE, ServerProcess

TEXTS = ["Hello world.", "Pagodas are towers with many eaves."]
GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "embeddings.md"
QUERY = "What is a pagoda?"


@pytest.fixture(scope="module")
def running():
    where = minilm.folder()
    if where is None:
        yield None
        return
    command = [
        *SERVE,
        str(where),
        "--host",
        "127.0.0.1",
        "--port",
        "0",
        "--device",
        "cpu",
        "--served-model-name",
        "mini",
        "--grpc-port",
        "0",
    ]
    with ServerProcess(command, patience=180) as server:
        yield server


@pytest.fixture
def server(running, require):
    require(minilm.PACKAGE, running is not None)
    return running


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.where}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


def test_vectors_over_grpc_are_those_over_http(server):
    expected = post(server, "/v1/embeddings", input=TEXTS).json()
    with grpc.insecure_channel(server.grpc) as channel:
        stub = InferenceStub(channel)
        reply = stub.Embed(pb.EmbedRequest(inputs=[pb.EmbedInput(text=text) for text in TEXTS]))
        ids = [stub.Tokenize(pb.TokenizeRequest(text=text)).token_ids for text in TEXTS]
        by_ids = stub.Embed(pb.EmbedRequest(inputs=[pb.EmbedInput(token_ids=pb.TokenIds(ids=one)) for one in ids]))
        short = stub.Embed(pb.EmbedRequest(inputs=[pb.EmbedInput(text=TEXTS[0])], dimensions=64))
        assert "embed" in stub.GetModelInfo(pb.GetModelInfoRequest()).tasks
        with pytest.raises(grpc.RpcError, match="does not generate text"):
            stub.Generate(pb.GenerateRequest(text="a"))
    assert reply.prompt_tokens == expected["usage"]["prompt_tokens"]
    for one, other, wanted in zip(reply.embeddings, by_ids.embeddings, expected["data"], strict=True):
        assert one.rows == 1
        np.testing.assert_allclose(one.values, wanted["embedding"], atol=1e-6)
        np.testing.assert_allclose(other.values, wanted["embedding"], atol=1e-6)
    assert len(short.embeddings[0].values) == 64


def test_the_guides_lines(server):
    lines = [line for line in GUIDE.read_text().splitlines() if line.startswith("curl ")]
    assert len(lines) >= 4
    for line in lines:
        done = subprocess.run(
            ["bash", "-c", line.replace("http://127.0.0.1:8000", server.where)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0 and "error" not in json.loads(done.stdout), (line, done.stdout, done.stderr)


def post(server, path, **body):
    return httpx.post(f"{server.where}{path}", json=body, timeout=60)


def vectors(reply):
    return np.array([entry.embedding for entry in reply.data])


def test_embeddings_for_openais_client(client):
    reply = client.embeddings.create(model="mini", input=TEXTS)
    got = vectors(reply)
    tokens = [[101, 7592, 2088, 1012, 102]]
    want = minilm.vectors(minilm.folder(), tokens).numpy()
    assert np.abs(got[0] - want[0]).max() < 1e-5
    assert (reply.usage.prompt_tokens, reply.usage.total_tokens) == (5 + 11, 5 + 11)
    by_ids = vectors(client.embeddings.create(model="mini", input=tokens))
    assert np.abs(by_ids - got[:1]).max() < 1e-6
    one = vectors(client.embeddings.create(model="mini", input=tokens[0], encoding_format="float"))
    assert np.abs(one - got[:1]).max() < 1e-6


def test_encodings_and_dimensions(server):
    plain = post(server, "/v1/embeddings", input=TEXTS[0]).json()
    coded = post(server, "/v1/embeddings", input=TEXTS[0], encoding_format="base64").json()["data"][0]["embedding"]
    values = plain["data"][0]["embedding"]
    assert np.array_equal(np.frombuffer(base64.b64decode(coded), "<f4"), np.array(values, np.float32))
    short = post(server, "/v1/embeddings", input=TEXTS[0], dimensions=32).json()["data"][0]["embedding"]
    assert np.allclose(short, np.array(values[:32]) / np.linalg.norm(values[:32]), atol=1e-6)
    raw = post(server, "/v1/embeddings", input=TEXTS[0], normalize=False).json()["data"][0]["embedding"]
    assert abs(np.linalg.norm(raw) - 1) > 0.01


def test_long_inputs(server):
    long = "word " * 400
    refused = post(server, "/v1/embeddings", input=long)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert post(server, "/v1/embeddings", input=long, truncate_prompt_tokens=-1).json()["usage"]["prompt_tokens"] == 256
    assert post(server, "/v1/embeddings", input=long, truncate_prompt_tokens=10).json()["usage"]["prompt_tokens"] == 10


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_rerank(server, path):
    reply = post(server, path, model="mini", query=QUERY, documents=[TEXTS[0], {"text": TEXTS[1]}], top_n=1).json()
    (best,) = reply["results"]
    assert best["index"] == 1
    assert best["relevance_score"] > 0.5
    assert best.get("document", {}).get("text") == (None if path.startswith("/v2") else TEXTS[1])


def test_score(server):
    reply = post(server, "/v1/score", text_1=QUERY, text_2=TEXTS).json()
    scores = [entry["score"] for entry in reply["data"]]
    ranked = post(server, "/rerank", query=QUERY, documents=TEXTS).json()["results"]
    assert {entry["index"]: entry["relevance_score"] for entry in ranked} == pytest.approx(dict(enumerate(scores)), abs=1e-6)
    assert post(server, "/score", queries=[QUERY, QUERY], documents=TEXTS).json()["data"][1]["score"] == pytest.approx(scores[1], abs=1e-6)


def test_pooling(server):
    whole = post(server, "/pooling", input=TEXTS[0]).json()["data"][0]["data"]
    each = post(server, "/pooling", input=TEXTS[0], task="token_embed").json()["data"][0]["data"]
    assert (np.array(whole).shape, np.array(each).shape) == ((384,), (5, 384))


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/v1/completions", {"prompt": "Hello"}, "does not generate"),
        ("/classify", {"input": "Hello"}, "classify"),
        ("/v1/embeddings", {"input": "Hello", "dimensions": 1000}, "dimensions=1000"),
        ("/v1/embeddings", {}, "input is missing"),
        ("/v1/embeddings", {"input": ["Hello", [1]]}, "mixes"),
        ("/v1/embeddings", {"input": []}, "input"),
        ("/rerank", {"query": "Hello", "documents": []}, "documents"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["a"]}, "no pairs"),
    ],
)
def test_what_cannot_be_answered_is_said(server, path, body, says):
    reply = post(server, path, **body)
    assert (reply.status_code, says in reply.json()["error"]["message"]) == (400, True), reply.text


def test_every_answer_is_of_openais_own_document(server, require):
    check = checker()
    require("OpenAI's API document", check is not None)
    with httpx.Client(base_url=f"{server.where}/v1", timeout=60) as http:
        for fields in ({}, {"encoding_format": "base64"}, {"dimensions": 8}, {"user": "somebody"}):
            reply = http.post("/embeddings", json={"model": "mini", "input": TEXTS, **fields})
            if reply.status_code == 400:
                check("ErrorResponse", reply.json())
                assert fields == {"dimensions": 8}
            elif fields.get("encoding_format") != "base64":  # whose texts the document's schema does not know
                check("CreateEmbeddingResponse", reply.json())
        check("ErrorResponse", http.post("/embeddings", json={"model": "mini", "input": []}).json())
