"""The SDK: `LLM` for scripts and notebooks, `AsyncLLM` for asyncio, `devices()`. The engine runs in this process."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, Literal, NamedTuple

from pagoda.hal.discovery import find_all
from pagoda.hal.errors import ConfigError, RequestError
from pagoda.hal.info import DeviceInfo
from pagoda.serving.engine.messages import EngineRequest, EngineStats
from pagoda.serving.engine.params import SamplingParams
from pagoda.serving.engine.pooling import PoolingParams
from pagoda.serving.frontend.lora import LoRARequest
from pagoda.serving.frontend.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from pagoda.serving.frontend.processor import Messages, Processor, Prompt
from pagoda.serving.frontend.session import Session
from pagoda.serving.frontend.text import Tokenizer
from pagoda.serving.local import config_of, open_local
from pagoda.serving.loop_thread import LoopThread, Progress
from pagoda.serving.pooling_calls import PoolingCalls

__all__ = [
    "LLM",
    "AsyncLLM",
    "Available",
    "CompletionOutput",
    "LoRARequest",
    "Logprob",
    "PoolingParams",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "devices",
]


Adapters = LoRARequest | Sequence[LoRARequest | None] | None
"""One adapter for all prompts, one for each, or none."""


class Available(NamedTuple):
    """A backend: its name for `device=`, whether it can be used here, what was found or is missing, and its devices."""

    name: str
    available: bool
    message: str
    devices: tuple[DeviceInfo, ...]


def devices() -> list[Available]:
    """Every backend that is installed, best first."""
    found = [(listed.name, listed.backend, listed.probe) for listed in find_all()]
    return [
        Available(name, probe.available, probe.message, tuple(backend.devices()) if backend is not None and probe.available else ())
        for name, backend, probe in found
    ]


class AsyncLLM:
    """A model in this process, for asyncio. Use it as `async with AsyncLLM(model=…) as llm:`, or call `start` and `close`.

    Args: those of `EngineConfig`. Everything that can be refused before weights load is refused here.
    """

    def __init__(self, model: str | None = None, **engine: Any) -> None:
        self.config = config_of(model, engine)
        self._session: Session | None = None

    async def start(self) -> AsyncLLM:
        """Load the model; idempotent. Raises `PagodaError`s that say what does not work."""
        if self._session is None:
            self._session = await open_local(self.config)
        return self

    async def close(self) -> None:
        """End running requests and the engine; idempotent."""
        session, self._session = self._session, None
        if session is not None:
            await session.client.close()

    async def __aenter__(self) -> AsyncLLM:
        return await self.start()

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    @property
    def session(self) -> Session:
        """The started engine with its text side."""
        if self._session is None:
            raise ConfigError("the engine is not running: use `async with AsyncLLM(…) as llm:`, or await llm.start()")
        return self._session

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Complete a prompt; yields the output as it grows (always the same object) until `finished`. Leaving early aborts."""
        adapter = await self.session.use_adapter(lora_request)
        request, text = self.session.of_prompt(prompt, sampling_params, request_id=request_id, adapter=adapter)
        async with aclosing(self.session.run(request, text)) as outputs:
            async for output in outputs:
                yield output

    async def chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
        **template: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer a conversation, as `generate`; `template` options: tools, add_generation_prompt, continue_final_message, variables."""
        adapter = await self.session.use_adapter(lora_request)
        request, text = self.session.of_chat(messages, sampling_params, template, request_id=request_id, adapter=adapter)
        async with aclosing(self.session.run(request, text)) as outputs:
            async for output in outputs:
                yield output

    async def abort(self, request_id: str) -> None:
        """End a request; its iterator gets a last output with finish_reason "abort"."""
        await self.session.client.abort([request_id])

    def default_params(self, **given: Any) -> SamplingParams:
        """The checkpoint's own sampling settings, `given` ones over them."""
        return self.session.processor.default_params(**given)


class LLM(PoolingCalls):
    """A model in this process, for scripts and notebooks. Close it, use it as a context manager, or let the process end.

    Args: those of `EngineConfig`. Raises `PagodaError`s that say what does not work.
    """

    def __init__(self, model: str | None = None, **engine: Any) -> None:
        self.config = config_of(model, engine)
        self._thread = LoopThread()
        try:
            self._session = self._thread.run(open_local(self.config))
        except BaseException:
            self._thread.stop()
            raise
        # also runs at interpreter exit, before threads are torn down
        self._finalizer = weakref.finalize(self, _shut_down, self._thread, self._session)

    def close(self) -> None:
        """End the engine and give its memory back; idempotent."""
        self._finalizer()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora_request: Adapters = None,
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts, all of them together; outputs are in the order of the prompts.

        Args:
            prompts: one, or a sequence: texts, lists of token ids, or mappings with "prompt" or "prompt_token_ids".
            sampling_params: for all, or one a prompt; by default the checkpoint's own.
            lora_request: the adapter for all, or one a prompt (None: the model itself); needs `enable_lora=True`.
            use_tqdm: show how far it is on standard error; by default on a terminal, for more than one prompt.

        Raises `RequestError` for what cannot be answered, before anything is sent.
        """
        many = _listed(prompts)
        adapters = self._names(lora_request, len(many))
        return self._run(self._session.of_prompts(many, _one_each(sampling_params, len(many)), adapters), use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora_request: Adapters = None,
        use_tqdm: bool | None = None,
        **template: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several together; `template` options: tools, add_generation_prompt, variables …"""
        many: Sequence[Any] = [messages] if not messages or isinstance(messages[0], dict) else messages
        each = zip(many, _one_each(sampling_params, len(many)), self._names(lora_request, len(many)), strict=True)
        return self._run([self._session.of_chat(chat, p, template, adapter=adapter) for chat, p, adapter in each], use_tqdm)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        beam_width: int = 4,
        max_tokens: int = 16,
        *,
        length_penalty: float = 1.0,
        ignore_eos: bool = False,
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]:
        """The `beam_width` most likely continuations of each prompt, best first; `cumulative_logprob` is a beam's."""
        many = _listed(prompts)
        params = SamplingParams(n=beam_width, temperature=0, max_tokens=max_tokens, ignore_eos=ignore_eos)
        requests = self._session.of_prompts(many, [params] * len(many), beam_width=beam_width, length_penalty=length_penalty)
        return self._run(requests, use_tqdm)

    def default_params(self, **given: Any) -> SamplingParams:
        """The checkpoint's own sampling settings, `given` ones over them."""
        return self._session.processor.default_params(**given)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached pages; False, and nothing forgotten, while requests run."""
        return bool(self._call("reset_prefix_cache"))

    def stats(self) -> EngineStats:
        """What the engine has counted, and holds now."""
        self._check_open()
        return self._thread.run(self._session.client.stats())

    def sleep(self, level: int = 1) -> None:
        """Give memory back until `wake_up`: level 1 the KV cache, level 2 the weights too. Refused while requests run."""
        self._call("sleep", level=level)

    def wake_up(self, tags: Sequence[Literal["weights", "kv_cache"]] | None = None) -> None:
        """All that sleeps, or what `tags` say; the weights not after the KV cache."""
        self._call("wake", kinds=[tag.removesuffix("_cache") for tag in tags] if tags else None)

    def start_profile(self) -> None:
        """Trace steps from now on; the folder is `profiler_config`'s."""
        self._call("start_profile")

    def stop_profile(self) -> list[str]:
        """End a trace; returns its files, a rank each."""
        return list(self._call("stop_profile"))

    @property
    def tokenizer(self) -> Tokenizer:
        return self._session.processor.text.tokenizer

    @property
    def processor(self) -> Processor:
        return self._session.processor

    def _names(self, asked: Adapters, count: int) -> list[str | None]:
        each = [asked] * count if asked is None or isinstance(asked, LoRARequest) else list(asked)
        if len(each) != count:
            raise RequestError(f"lora_request holds {len(each)} adapters for {count} prompts; give one, or one for each")
        self._check_open()
        return [self._thread.run(self._session.use_adapter(one)) for one in each]

    def _run(self, requests: Sequence[tuple[EngineRequest, str | None]], shown: bool | None) -> list[RequestOutput]:
        self._check_open()
        return self._thread.run(_all(self._session, requests, Progress(len(requests), shown)))

    def _call(self, method: str, **arguments: object) -> object:
        self._check_open()
        return self._thread.run(self._session.client.call(method, **arguments))

    def _check_open(self) -> None:
        if not self._finalizer.alive:
            raise ConfigError("this LLM was closed; make a new one")


async def _all(session: Session, requests: Sequence[tuple[EngineRequest, str | None]], progress: Progress) -> list[RequestOutput]:
    async def one(request: EngineRequest, prompt: str | None) -> RequestOutput:
        output = await session.complete(request, prompt)
        progress.advance(len(output.prompt_token_ids), sum(len(answer.token_ids) for answer in output.outputs))
        return output

    try:
        async with asyncio.TaskGroup() as group:  # one failure ends the others, also in the engine
            tasks = [group.create_task(one(*request)) for request in requests]
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    finally:
        progress.end()
    return [task.result() for task in tasks]


def _listed(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str | dict) or (prompts and isinstance(prompts[0], int)):  # type: ignore[index]
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _one_each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> Sequence[SamplingParams | None]:
    if params is None or isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise RequestError(f"sampling_params holds {len(params)} settings for {count} prompts; give one, or one for each")
    return params


def _shut_down(thread: LoopThread, session: Session) -> None:
    try:
        thread.run(session.client.close())
    finally:
        thread.stop()
