"""What the clients of `soak_server.py` do: an action for each way in which servers are used, checked as far as an answer can be known."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import urlsplit

import httpx
from pagoda.serving.api.grpc import pagoda_pb2 as pb
from pagoda.serving.api.grpc.pagoda_pb2_grpc import InferenceStub
from pagoda.serving.cli.remote import lines_of

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "samples"))

from hostile import bases_of, cases, encoded
from hostile_http import frame, hang_up, send_frame
from tiny_servers import tone
from tiny_vision import picture

VOCAB = 490
STREAMS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/inference/v1/generate")
LOOKS = (
    "/health", "/live", "/ready", "/metrics", "/stats", "/load", "/v1/models", "/version", "/server_info", "/", "/tokenizer_info",
    "/openapi.json",
)  # fmt: skip
CHAT = [{"role": "user", "content": "hello"}]
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2, 3]}}, "required": ["a"], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
SOUND = tone()


def _image(seed: int) -> str:
    out = io.BytesIO()
    picture(seed).save(out, "png")
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()


IMAGES = [_image(seed) for seed in range(4)]


@dataclass
class Client:
    """One client's way of asking; `http`: by kind of server. Every action raises or notes a fault when its answer is not right; `exact`:
    tokens do not depend on who else is in a step."""

    http: dict[str, httpx.AsyncClient]
    stub: InferenceStub
    rng: Random
    adapters: Path
    number: int
    seen: Counter[str]
    faults: list[str]
    exact: bool = True

    async def post(self, kind: str, path: str, **body: Any) -> Any:
        answer = await self.http[kind].post(path, json=body)
        if answer.status_code != 200:
            raise ValueError(f"{path}: {answer.status_code} {answer.text[:200]}")
        return answer.json() if "json" in answer.headers["content-type"] else answer.text

    def expect(self, right: bool, what: Any) -> None:
        if not right:
            raise ValueError(f"wrong: {str(what)[:300]}")

    def prompt(self) -> list[int]:
        start = self.rng.choice((10, 20))  # some begin alike, so that cached pages are shared and evicted
        length = self.rng.randint(1, 150)
        return [start + k for k in range(length // 2)] + [self.rng.randrange(10, VOCAB) for _ in range(length - length // 2)]

    async def completion(self) -> None:
        count, n = self.rng.randint(1, 40), self.rng.choice((1, 1, 3))
        body = {
            "prompt": self.prompt(),
            "max_tokens": count,
            "n": n,
            "ignore_eos": True,
            "temperature": self.rng.choice((0, 1)),
            "logprobs": self.rng.choice((None, 2)),
        }
        reply = await self.post("generate", "/v1/completions", **body)
        self.expect(reply["usage"]["completion_tokens"] == count * n, reply)

    async def batch(self) -> None:
        prompts = [self.prompt() for _ in range(self.rng.randint(2, 6))]
        n = self.rng.choice((1, 2))
        reply = await self.post("generate", "/v1/completions", prompt=prompts, n=n, max_tokens=5, ignore_eos=True)
        self.expect([choice["index"] for choice in reply["choices"]] == list(range(len(prompts) * n)), reply)
        self.expect(reply["usage"]["completion_tokens"] == 5 * n * len(prompts), reply)

    async def beams(self) -> None:
        body = {"prompt": self.prompt(), "use_beam_search": True, "n": 3, "max_tokens": 6, "ignore_eos": True, "temperature": 0}
        reply = await self.post("generate", "/v1/completions", **body)
        self.expect(len({choice["text"] for choice in reply["choices"]}) >= 1 and len(reply["choices"]) == 3, reply)

    async def same_seed(self) -> None:
        body = {"prompt": self.prompt(), "max_tokens": 12, "ignore_eos": True, "seed": self.rng.randrange(1000)}
        reply = await self.post("generate", "/v1/completions", **body)
        text = "".join([event["choices"][0]["text"] for event in await self.events("/v1/completions", body) if event["choices"]])
        self.expect(not self.exact or text == reply["choices"][0]["text"], (text, reply))

    async def chat(self) -> None:
        count = self.rng.randint(1, 30)
        events = await self.events(
            "/v1/chat/completions", {"messages": CHAT, "max_tokens": count, "ignore_eos": True, "stream_options": {"include_usage": True}}
        )
        self.expect(events[-1]["usage"]["completion_tokens"] == count, events[-1])

    async def structured(self) -> None:
        form = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
        reply = await self.post(
            "generate", "/v1/chat/completions", messages=CHAT, max_tokens=40, response_format=form, include_reasoning=False
        )
        choice = reply["choices"][0]
        if choice["finish_reason"] == "stop":
            self.expect(json.loads(choice["message"]["content"])["a"] in (1, 2, 3), reply)

    async def tools(self) -> None:
        choice = {"type": "function", "function": {"name": "f"}}
        reply = await self.post("generate", "/v1/chat/completions", messages=CHAT, tools=[TOOL], tool_choice=choice, max_tokens=60)
        for call in reply["choices"][0]["message"].get("tool_calls") or ():
            if reply["choices"][0]["finish_reason"] != "length":
                self.expect(json.loads(call["function"]["arguments"])["a"] in (1, 2, 3), reply)

    async def turns(self) -> None:
        """A stored conversation of two turns, looked at and ended in the middle."""
        first = await self.post("generate", "/v1/responses", input="hello", max_output_tokens=4)
        second = await self.post(
            "generate", "/v1/responses", input="on", previous_response_id=first["id"], max_output_tokens=400, background=True
        )
        items = (await self.http["generate"].get(f"/v1/responses/{second['id']}/input_items")).json()["data"]
        self.expect(len(items) > 1, items)
        ended = await self.post("generate", f"/v1/responses/{second['id']}/cancel")
        self.expect(ended["status"] in ("cancelled", "completed", "incomplete"), ended)

    async def response(self) -> None:
        reply = await self.post("generate", "/v1/responses", input="hello", max_output_tokens=8, background=self.rng.random() < 0.3)
        one = f"/v1/responses/{reply['id']}"
        for turn in range(600):
            if (found := (await self.http["generate"].get(one)).json())["status"] not in ("queued", "in_progress"):
                break
            await asyncio.sleep(min(1.0, 0.05 * (1 + turn)))
        self.expect(found["status"] in ("completed", "incomplete"), found)
        if self.rng.random() < 0.5:
            self.expect((await self.http["generate"].delete(one)).json()["deleted"], one)

    async def message(self) -> None:
        body = {"model": "tiny", "messages": CHAT, "max_tokens": 8}
        counted = await self.post("generate", "/v1/messages/count_tokens", model="tiny", messages=CHAT)
        reply = await self.post("generate", "/v1/messages", **body)
        self.expect(reply["usage"]["input_tokens"] + reply["usage"]["cache_read_input_tokens"] == counted["input_tokens"], (reply, counted))

    async def message_stream(self) -> None:
        body = {"model": "tiny", "messages": CHAT, "max_tokens": 8, "stream": True}
        async with self.http["generate"].stream("POST", "/v1/messages", json=body) as answer:
            lines = [line async for line in lines_of(answer) if line.startswith(b"event: ")]
        self.expect(lines[:1] == [b"event: message_start"] and lines[-1:] == [b"event: message_stop"], lines)

    async def calls(self) -> None:
        """gRPC."""
        asked = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=self.prompt()), sampling=pb.SamplingParams(max_tokens=self.rng.randint(1, 20), ignore_eos=True)
        )
        chunks = [chunk async for chunk in self.stub.GenerateStream(asked)]
        self.expect(chunks[-1].usage.completion_tokens == asked.sampling.max_tokens, chunks[-1])
        whole = await self.stub.Generate(asked)
        self.expect(whole.usage.completion_tokens == asked.sampling.max_tokens, whole)

    async def ids(self) -> None:
        [made] = await self.post("generate", "/v1/completions/render", prompt="hello", max_tokens=6, temperature=0, ignore_eos=True)
        reply = await self.post("generate", "/inference/v1/generate", **made)
        self.expect(len(reply["choices"][0]["token_ids"]) == 6, reply)

    async def tokens(self) -> None:
        text = "The quick brown fox " * self.rng.randint(1, 200)
        found = await self.post("generate", "/tokenize", prompt=text)
        self.expect((await self.post("generate", "/detokenize", tokens=found["tokens"]))["prompt"] == text, found["count"])

    async def lora(self) -> None:
        name = f"a{self.number}"
        await self.post("generate", "/v1/load_lora_adapter", lora_name=name, lora_path=str(self.adapters))
        reply = await self.post("generate", "/v1/completions", model=name, prompt="hi", max_tokens=3, ignore_eos=True)
        await self.post("generate", "/v1/unload_lora_adapter", lora_name=name)
        self.expect(reply["model"] == name, reply)

    async def vectors(self) -> None:
        texts = ["hello"] * self.rng.randint(1, 8)
        reply = await self.post("embed", "/v1/embeddings", input=texts)
        self.expect(len(reply["data"]) == len(texts), reply)
        await self.post("embed", "/pooling", input="hello", task="token_embed")

    async def scores(self) -> None:
        reply = await self.post("embed", "/rerank", query="a", documents=["b", "a", "cc"])
        self.expect(len(reply["results"]) == 3, reply)
        await self.post("embed", "/v1/score", text_1="a", text_2=["b", "c"])

    async def classes(self) -> None:
        texts = ["hello"] * self.rng.randint(1, 4)
        reply = await self.post("score", "/classify", input=texts)
        self.expect(len(reply["data"]) == len(texts), reply)
        reply = await self.post("score", "/score", text_1="a", text_2=["b", "c"])
        self.expect(len(reply["data"]) == 2, reply)

    async def images(self) -> None:
        seen = [{"type": "image_url", "image_url": {"url": url}} for url in self.rng.sample(IMAGES, self.rng.randint(1, 2))]
        messages = [{"role": "user", "content": [*seen, {"type": "text", "text": "t40"}]}]
        reply = await self.post("see", "/v1/chat/completions", messages=messages, max_tokens=4, ignore_eos=True)
        self.expect(reply["usage"]["completion_tokens"] == 4, reply)

    async def speech(self) -> None:
        sent: Any = {
            "file": ("a.wav", SOUND),
            "temperature": (None, "0"),
            "response_format": (None, self.rng.choice(("json", "verbose_json", "srt"))),
        }
        answer = await self.http["hear"].post(self.rng.choice(("/v1/audio/transcriptions", "/v1/audio/translations")), files=sent)
        self.expect(answer.status_code == 200, answer.text)

    async def look(self) -> None:
        path = self.rng.choice(LOOKS)
        answer = await self.http[self.rng.choice(list(self.http))].get(path)
        self.expect(answer.status_code == 200, (path, answer.status_code))

    async def left(self) -> None:
        path = self.rng.choice(STREAMS)
        body = {**bases_of(path)[0], "stream": True, "max_tokens": 200, "ignore_eos": True}
        at = urlsplit(str(self.http["generate"].base_url))
        await hang_up(self.rng, str(at.hostname), int(at.port or 0), path, encoded(body))

    async def malformed(self) -> None:
        _, case = cases(self.rng, 2)
        if case.kind == "template":
            return
        kind = self.rng.choice(list(self.http))
        answer = await self.http[kind].post(case.path, content=case.body, headers={"Content-Type": case.media})
        self.expect(answer.status_code < 500, (case, answer.text))
        at = urlsplit(str(self.http[kind].base_url))
        status = await send_frame(str(at.hostname), int(at.port or 0), frame(self.rng))
        self.expect(not status.startswith("5"), status)

    async def slow(self) -> None:
        body = {"prompt": self.prompt(), "max_tokens": 300, "ignore_eos": True, "stream": True, "logprobs": 5}
        async with self.http["generate"].stream("POST", "/v1/completions", json=body) as answer:
            lines = []
            async for line in lines_of(answer):
                lines += [line] if line else []
                await asyncio.sleep(0.01)
        self.expect(len(lines) > 1 and lines[-1] == b"data: [DONE]" and b'"length"' in lines[-2], lines[-2:])

    async def events(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        async with self.http["generate"].stream("POST", path, json={**body, "stream": True}) as answer:
            lines = [line async for line in lines_of(answer) if line]
        self.expect(lines[-1:] == [b"data: [DONE]"], lines[-1:])
        return [json.loads(line[6:]) for line in lines[:-1]]


ACTIONS: dict[str, tuple[int, Callable[[Client], Awaitable[None]]]] = {
    "completion": (16, Client.completion),
    "batch": (3, Client.batch),
    "beams": (2, Client.beams),
    "same_seed": (6, Client.same_seed),
    "chat": (12, Client.chat),
    "structured": (4, Client.structured),
    "tools": (4, Client.tools),
    "turns": (3, Client.turns),
    "response": (6, Client.response),
    "message": (6, Client.message),
    "message_stream": (4, Client.message_stream),
    "calls": (4, Client.calls),
    "ids": (4, Client.ids),
    "tokens": (4, Client.tokens),
    "lora": (2, Client.lora),
    "vectors": (6, Client.vectors),
    "scores": (6, Client.scores),
    "classes": (4, Client.classes),
    "images": (4, Client.images),
    "speech": (4, Client.speech),
    "look": (4, Client.look),
    "left": (14, Client.left),
    "malformed": (6, Client.malformed),
    "slow": (4, Client.slow),
}
