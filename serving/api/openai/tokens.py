"""`POST /tokenize` and `POST /detokenize`, and `GET /tokenizer_info` for clients that score texts by them."""

from __future__ import annotations

import msgspec
from pagoda.hal.errors import RequestError
from pagoda.serving.api.body import BodyReader
from pagoda.serving.api.openai.messages import chat_prompt
from pagoda.serving.api.openai.protocol import DetokenizeRequest, TokenizeRequest
from pagoda.serving.api.openai.replies import TokenizeReply
from pagoda.serving.api.service import Service
from starlette.requests import Request
from starlette.responses import Response


class Tokens:
    """The endpoints."""

    def __init__(self, service: Service, bodies: BodyReader) -> None:
        self._service, self._bodies = service, bodies

    async def tokenize(self, request: Request) -> Response:
        body = await self._bodies.read(request, TokenizeRequest)
        self._service.check_model(body.model)
        tokens = await self._ids(body)
        tokenizer = self._service.text.tokenizer
        reply = TokenizeReply(
            count=len(tokens),
            max_model_len=self._service.client.facts.max_model_len,
            tokens=tokens,
            token_strs=[tokenizer.token_text(token) for token in tokens] if body.return_token_strs else None,
        )
        return Response(msgspec.json.encode(reply), media_type="application/json")

    async def _ids(self, body: TokenizeRequest) -> list[int]:
        if (body.prompt is None) == (body.messages is None):
            raise RequestError("give either prompt or messages", param="prompt")
        if body.prompt is None:
            return (await chat_prompt(self._service, body, tools=body.tools)).ids
        special = body.add_special_tokens is not False
        return await self._service.off_loop(len(body.prompt), self._service.text.tokenizer.encode, body.prompt, add_special_tokens=special)

    async def detokenize(self, request: Request) -> Response:
        body = await self._bodies.read(request, DetokenizeRequest)
        self._service.check_model(body.model)
        size = self._service.text.tokenizer.vocab_size
        if bad := [token for token in body.tokens if not 0 <= token < size]:
            raise RequestError(f"tokens holds the id {bad[0]}; ids go from 0 to {size - 1}", param="tokens")
        text = await self._service.off_loop(len(body.tokens), self._service.text.tokenizer.decode, body.tokens, skip_special_tokens=False)
        return Response(msgspec.json.encode({"prompt": text}), media_type="application/json")

    async def info(self, request: Request) -> Response:
        """Special tokens by their names in tokenizer_config.json, and the chat template."""
        text = self._service.text
        special = dict(getattr(text.tokenizer, "special_tokens", {}))
        if "eos_token" not in special and text.tokenizer.eos_ids:
            special["eos_token"] = text.tokenizer.decode(text.tokenizer.eos_ids[:1], skip_special_tokens=False)
        sources = getattr(text.template, "sources", {})
        facts = {"model_max_length": self._service.client.facts.max_model_len, "vocab_size": text.tokenizer.vocab_size}
        return Response(msgspec.json.encode({**special, **facts, "chat_template": sources.get("default")}), media_type="application/json")
