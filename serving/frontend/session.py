"""One engine with its text side: prompts and conversations in, growing `RequestOutput`s out. SDK and commands stand on it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from pagoda.hal.errors import RequestError
from pagoda.serving.engine.client import EngineClient
from pagoda.serving.engine.mailbox import PATIENCE
from pagoda.serving.engine.messages import EngineRequest
from pagoda.serving.engine.params import SamplingParams
from pagoda.serving.frontend.lora import LoRARequest
from pagoda.serving.frontend.outputs import OutputBuilder, RequestOutput
from pagoda.serving.frontend.parsers.events import PROMPT_END
from pagoda.serving.frontend.processor import Encoded, Messages, Processor, Prompt
from pagoda.serving.frontend.structured.answers import budgeted
from pagoda.serving.frontend.text_deltas import searches


class Session:
    """Runs requests on a started engine, in the asyncio loop that the client belongs to."""

    def __init__(self, client: EngineClient, processor: Processor) -> None:
        self.client = client
        self.processor = processor
        self._adapters = {name for name, *_ in client.facts.adapters}

    async def use_adapter(self, adapter: LoRARequest | None) -> str | None:
        """The name for requests, loaded if it was not. Raises `RequestError` for an adapter that does not fit the model."""
        if adapter is None:
            return None
        if adapter.lora_name not in self._adapters:
            if not adapter.lora_path:
                raise RequestError(f"adapter {adapter.lora_name!r} is not loaded and brings no lora_path", param="lora_request")
            await self.client.call("load_adapter", name=adapter.lora_name, path=adapter.lora_path)
            self._adapters.add(adapter.lora_name)
        return adapter.lora_name

    def of_prompt(self, prompt: Prompt, params: SamplingParams | None = None, **fields: Any) -> tuple[EngineRequest, str | None]:
        """A request for a prompt, checked, not sent; the prompt's text beside it. `fields` are those of `Processor.request`."""
        return self._made(self.processor.encode(prompt), params, fields)

    def of_prompts(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams | None],
        adapters: Sequence[str | None] | None = None,
        **fields: Any,
    ) -> list[tuple[EngineRequest, str | None]]:
        """The same for several prompts, each with its settings and its adapter."""
        each = zip(self.processor.encode_all(prompts), params, adapters or [None] * len(prompts), strict=True)
        return [self._made(encoded, p, fields | {"adapter": adapter}) for encoded, p, adapter in each]

    def of_chat(
        self, messages: Messages, params: SamplingParams | None = None, options: dict[str, Any] | None = None, **fields: Any
    ) -> tuple[EngineRequest, str | None]:
        """The same for a conversation; `options` go to the chat template."""
        return self._made(self.processor.encode_chat(messages, **options or {}), params, fields)

    def _made(self, encoded: Encoded, params: SamplingParams | None, fields: dict[str, Any]) -> tuple[EngineRequest, str | None]:
        params = self._bounded(params or self.processor.params_for(len(encoded.ids), {}), encoded)
        more = {"media": encoded.media, "positions": encoded.positions, "encoder": encoded.encoder, **fields}
        return self.processor.request(encoded.ids, params, **more), encoded.text

    def _bounded(self, params: SamplingParams, encoded: Encoded) -> SamplingParams:
        """With its budget of thoughts in the form that the engine follows. Raises `RequestError` where the model's have no known end."""
        budget, text = params.thinking_token_budget, self.processor.text
        if budget is None:
            return params
        end = text.tokenizer.decode(encoded.ids[-PROMPT_END:], skip_special_tokens=False)
        return replace(params, structured_outputs=budgeted(params.structured_outputs, budget, text.answers, end, "thinking_token_budget"))

    async def run(self, request: EngineRequest, prompt: str | None = None, *, patient: bool = False) -> AsyncGenerator[RequestOutput, None]:
        """Send a request; yields its output, the same growing object, after every step until it is finished (`patient`: less often).

        Leaving early ends the request in the engine, as do its stop strings.
        """
        builder = OutputBuilder(request, prompt, self.processor.text.tokenizer)
        async with aclosing(self.client.generate(request, PATIENCE if patient else 1)) as deltas:  # type: ignore[type-var]
            async for delta in deltas:
                builder.push(delta)
                yield builder.output
                if builder.output.finished:
                    return
                for index in builder.take_stopped():
                    await self.client.abort([request.request_id], index)

    async def complete(self, request: EngineRequest, prompt: str | None = None) -> RequestOutput:
        """The finished output. Without stop strings nothing needs its tokens before the end, so the engine may keep them."""
        outputs = self.run(request, prompt, patient=not searches(request.params))
        async with aclosing(outputs):
            async for output in outputs:
                if output.finished:
                    return output
        raise AssertionError("an engine's stream ends with a finished delta")
