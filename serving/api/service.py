"""What all protocols share: one engine, its text side, and every request that runs between them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pagoda.hal.errors import EngineDeadError, NotFoundError, PagodaError, RequestError
from pagoda.models.media import Numbers
from pagoda.serving.api.adapters import AdapterCard, cards_of
from pagoda.serving.api.config import ServerConfig
from pagoda.serving.api.desk import Desk, SharedDesk
from pagoda.serving.api.errors import AbortedError, DrainingError, OverloadedError, RequestTimeoutError
from pagoda.serving.api.fetching import Fetcher
from pagoda.serving.api.keys import CLIENT
from pagoda.serving.api.live_names import TAIL, engine_id, found_among, hex_tokens
from pagoda.serving.api.metrics import Metrics, RequestTimer
from pagoda.serving.api.outlet import Outlet
from pagoda.serving.api.request_log import AnswerLog, request_line
from pagoda.serving.api.tally import Tally
from pagoda.serving.api.tracing_of import tracing_of
from pagoda.serving.engine.client import EngineClient
from pagoda.serving.engine.mailbox import PATIENCE, Plain
from pagoda.serving.engine.messages import EngineRequest, FinishReason, RequestDelta, TokenLogprobs, error_of, one_by_one
from pagoda.serving.engine.pooling import Pooled
from pagoda.serving.frontend.embeds_child import EmbedsChild
from pagoda.serving.frontend.media_child import MediaChild
from pagoda.serving.frontend.processor import MANY, Encoded, Processor, check_kinds
from pagoda.serving.frontend.prompt_embeds import PARAM
from pagoda.serving.frontend.text import TextFrontend
from pagoda.serving.frontend.text_deltas import RequestText, TextDelta

log = logging.getLogger("pagoda.api")
T = TypeVar("T")

LONG_TEXT = 2048
"""Characters above which text is tokenized off the event loop."""

LONGEST_TOKEN = 512
"""Characters that no token exceeds."""


class Step(NamedTuple):
    """Text that one engine step gave one request; `cached_tokens` and `prompt_logprobs` come with the first; `pooled`: instead of text."""

    deltas: list[TextDelta]
    cached_tokens: int = 0
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    pooled: Pooled | None = None


@dataclass(frozen=True)
class ModelCard:
    """The served model: names that requests may use (the first one appears in replies), and its defaults for sampling."""

    names: tuple[str, ...]
    root: str
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)
    created: int = field(default_factory=lambda: int(time.time()))


class Service:
    """Runs requests: admission, text, metrics, and the server's state (serving, draining, dead)."""

    def __init__(
        self,
        client: EngineClient,
        text: TextFrontend,
        card: ModelCard,
        config: ServerConfig,
        tally: Tally | None = None,
        desk: Desk | None = None,
    ) -> None:
        """`tally`, `desk`: shared with the other API processes of this server, where there are some."""
        self.client, self.text, self.card, self.config = client, text, card, config
        media = MediaChild(Path(card.root)) if client.facts.modalities else None
        self.processor = Processor(text, client.facts, card.sampling_defaults, media)
        self._embeds = EmbedsChild(client.facts.embeds_width, client.facts.max_model_len - 1) if client.facts.embeds_width else None
        self._fetcher = Fetcher(config.allowed_media_domains, config.allowed_local_media_path)
        self._readers = ThreadPoolExecutor(1, thread_name_prefix="images")
        self.metrics = Metrics(card.names[0])
        self.tracing = tracing_of(config, card.names[0])
        self.desk: Desk = desk or SharedDesk(config).at(0)
        self.desk.on_abort = self.abort_named
        self.adapters = cards_of(client.facts.adapters, card.names)
        self.draining = False
        self.dead: str | None = None
        self._tally = tally or Tally()
        self._tails = hex_tokens(TAIL // 2)
        self._live: dict[str, str] = {}  # whose they are
        self._queued: dict[str, int] = {}
        self._queued_tokens = 0
        self._late: set[str] = set()
        self._aborts: set[asyncio.Future[None]] = set()
        # mean seconds between first tokens of late, from which a full queue says when to come again
        self._pace, self._last_start = 0.1, time.monotonic()
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="tokenize")

    @property
    def load(self) -> int:
        """Requests in the engine on behalf of this process's clients."""
        return len(self._live)

    @property
    def server_load(self) -> int:
        """Those of all API processes of this server."""
        return self._tally.running

    def take_adapters(self, loaded: Iterable[tuple[str, str, str | None]]) -> None:
        """These are loaded from now on, whoever did it."""
        cards = {name: AdapterCard(name, path, parent or self.card.names[0]) for name, path, parent in loaded}
        old = self.adapters
        self.adapters = {name: old[name] if name in old and old[name].root == card.root else card for name, card in cards.items()}

    def check_model(self, name: str | None) -> str:
        """The name for the reply. Raises `NotFoundError` for a model that is not served; none means the served one."""
        if name is not None and name not in self.card.names and name not in self.adapters:
            served = ", ".join((*self.card.names, *self.adapters))
            raise NotFoundError(f"the model {name!r} is not served here; there is: {served}", param="model", code="model_not_found")
        return name or self.card.names[0]

    def engine_id(self, reply_id: str) -> str:
        """See `live_names`."""
        return engine_id(reply_id, next(self._tails))

    def adapter_of(self, name: str | None) -> str | None:
        """The adapter that a checked name stands for; None for the model itself."""
        return name if name in self.adapters else None

    def check_open(self) -> None:
        """Raises when the server takes no new requests."""
        if self.dead is not None:
            raise EngineDeadError(self.dead)
        if self.draining:
            raise DrainingError("the server is shutting down; send the request to another one")

    def check_size(self, characters: int) -> None:
        """Refuses text that no tokenizer could fit into the model, before time is spent on it."""
        longest = self.client.facts.max_model_len
        if characters > longest * LONGEST_TOKEN:
            raise RequestError(
                f"the prompt has {characters} characters; the model's context is {longest} tokens, which is far less",
                param="prompt",
                code="context_length_exceeded",
            )

    async def off_loop(self, size: int, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call a function of text: here when the text is short, in a thread when it would hold up other streams."""
        if size <= LONG_TEXT:
            return function(*args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._threads, lambda: function(*args, **kwargs))

    def check_media(self, media: Mapping[str, Sequence[Any]]) -> None:
        """Raises `RequestError` for media of a kind that the model does not take, or too many, or of another form than addresses."""
        check_kinds(media, self.client.facts.modalities if self.processor.media is not None else (), "messages")
        for kind, given in media.items():
            most = self.config.limit_mm_per_prompt.get(kind)
            if most is not None and len(given) > most:
                raise RequestError(
                    f"the prompt has {len(given)} {MANY[kind]}, at most {most} are taken; the flag is --limit-mm-per-prompt",
                    param="messages",
                )
            if not all(isinstance(address, str) for address in given):
                raise RequestError(f"{MANY[kind]} must come by their address: https://… or data:{kind}/…;base64,…", param="messages")

    async def see(self, text: str, media: Mapping[str, Sequence[str]]) -> Encoded:
        """A rendered conversation with its media, by their addresses. Raises `RequestError` for those that cannot be had or read."""
        read_media = self.processor.media
        assert read_media is not None
        given = {kind: await self._fetcher.fetch(addresses) for kind, addresses in media.items()}
        read = asyncio.get_running_loop().run_in_executor(self._readers, lambda: read_media(text, given, add_special_tokens=False))
        ids, items, positions = await read
        return Encoded(ids, text, items, positions)

    async def rows(self, text: str) -> Numbers:
        """A prompt of embeddings from its base64. Raises `RequestError` for what is none, and where none are taken."""
        if self._embeds is None:
            raise RequestError("prompts of embeddings are not taken by this server; start it with --enable-prompt-embeds", param=PARAM)
        return await asyncio.get_running_loop().run_in_executor(self._readers, self._embeds, text)

    async def generate(
        self,
        request: EngineRequest,
        *,
        patient: bool = False,
        interval: int | None = None,
        outlet: Outlet | None = None,
        apart: bool = False,
    ) -> AsyncGenerator[Step, None]:
        """Run one request. Leaving the iterator early, and a stop string, end it in the engine too. `patient`: for callers that show
        nothing before the end; others get `interval` tokens at a time, by default as the configuration says. What goes through `outlet`
        is not yielded. `apart`: the only sequence's tokens are yielded each by itself."""
        self._admit(request)
        timer = self.metrics.timer(request)
        span = self.tracing.begin(request) if self.tracing is not None else None
        limit = self._end_after(request.request_id)
        text = RequestText(self.text.tokenizer, request.params, request.prompt)
        answer = self._answer_log(request, parts=not patient)
        plain = short_way(text, timer, outlet) if outlet is not None and answer is None else None
        try:
            patience = (1 if text.searches else PATIENCE) if patient else interval or self.config.stream_interval
            generated: Any = self.client.generate(request, patience, plain)
            async with aclosing(_apart(generated) if apart else generated) as deltas:
                async for delta in deltas:
                    self._started(request.request_id)
                    if request.request_id in self._late:
                        raise RequestTimeoutError(
                            f"the request took longer than the {self.config.request_timeout:g} s that this server gives"
                        )
                    parts = text.push(_checked(delta))
                    timer.step(parts, delta.queued)
                    if answer is not None:
                        answer.step(parts)
                    yield Step(parts, delta.cached_tokens, delta.prompt_logprobs, delta.pooled)
                    if delta.finished or text.finished:
                        break
                    for index in text.take_stopped():
                        await self.client.abort([request.request_id], index)
        except Exception as error:
            if span is not None:
                span.failed(error)
            if isinstance(error, EngineDeadError):
                self.engine_died(str(error))
            raise
        finally:
            self._live.pop(request.request_id, None)
            self._queued_tokens -= self._queued.pop(request.request_id, 0)
            self._count()
            self._late.discard(request.request_id)
            if limit is not None:
                limit.cancel()
            timer.end()
            if span is not None:
                span.end(timer)
            if answer is not None:
                answer.end()

    def _answer_log(self, request: EngineRequest, parts: bool) -> AnswerLog | None:
        if not self.config.enable_log_outputs or request.pooling is not None:
            return None
        return AnswerLog(request.request_id, self.config.max_log_len, parts and self.config.enable_log_deltas)

    async def pool(self, request: EngineRequest) -> Pooled:
        """Run one pooling request to its answer."""
        async with aclosing(self.generate(request)) as steps:
            async for step in steps:
                if step.pooled is not None:
                    return step.pooled
        raise self.ended_early()

    def ended_early(self) -> PagodaError:
        """What a request comes to that the engine was told to end, where its protocol has no word for that."""
        if self.draining:
            return DrainingError("the server is shutting down and ended this request; send it to another one")
        return AbortedError("the request was ended by its id")

    def _end_after(self, request_id: str) -> asyncio.TimerHandle | None:
        if self.config.request_timeout is None:
            return None
        return asyncio.get_running_loop().call_later(self.config.request_timeout, self._time_out, request_id)

    def _time_out(self, request_id: str) -> None:
        self._late.add(request_id)
        self._abort_soon([request_id])

    def abort_named(self, names: Collection[str] | None, client: str) -> list[str]:
        """End this client's requests of these names in this process, without names all; returns the names of those that ran.
        They answer with what there is, with the reason `abort`."""
        found = found_among([one for one, whose in self._live.items() if whose == client], names)
        if found:
            self._abort_soon([*dict.fromkeys(one for ids in found.values() for one in ids)])
        return [*found]

    def _abort_soon(self, request_ids: list[str]) -> None:
        self._aborts.add(task := asyncio.ensure_future(self.client.abort(request_ids)))
        task.add_done_callback(self._aborts.discard)

    def _started(self, request_id: str) -> None:
        if (tokens := self._queued.pop(request_id, None)) is not None:
            self._queued_tokens -= tokens
            self._count()
            now = time.monotonic()
            self._pace += 0.1 * (min(now - self._last_start, 10.0) - self._pace)
            self._last_start = now

    @property
    def _queue_seconds(self) -> int:
        return max(1, min(60, round(self._tally.queued * self._pace)))

    def _admit(self, request: EngineRequest) -> None:
        self.check_open()
        self.check_room(len(request.prompt))
        self._live[request.request_id] = CLIENT.get()
        self._queued[request.request_id] = len(request.prompt)
        self._queued_tokens += len(request.prompt)
        if self.config.enable_log_requests:
            log.info(request_line(request, self.text.tokenizer, self.config.max_log_len))
        self._count()

    def check_room(self, tokens: int) -> None:
        """Raises `OverloadedError` when the queue cannot take one more request of so many prompt tokens, and counts it."""
        if self.config.max_num_queued_reqs is None and self.config.max_num_queued_tokens is None:
            return
        # an empty queue takes any request, or a large one would never be served
        for limit, asked, waiting, unit in (
            (self.config.max_num_queued_reqs, 1, self._tally.queued, "requests"),
            (self.config.max_num_queued_tokens, tokens, self._tally.tokens, "prompt tokens"),
        ):
            if limit is not None and 0 < waiting > limit - asked:
                self.metrics.rejected()
                raise OverloadedError(
                    f"the queue holds {waiting} {unit}, this request brings {asked}, the limit is {limit}; try again later",
                    asked=asked,
                    available=limit - waiting,
                    retry_after=self._queue_seconds,
                )

    def _count(self) -> None:
        self._tally.write(len(self._queued), self._queued_tokens, len(self._live))

    def engine_died(self, reason: str) -> None:
        """Remember why; from here on health and every request answer 503."""
        self.dead = self.dead or reason

    async def abort_all(self) -> None:
        """End every running request in the engine; their clients get what there is, with the reason `abort`."""
        await self.client.abort(list(self._live))

    def close(self) -> None:
        for threads in (self._threads, self._readers):
            threads.shutdown(wait=False, cancel_futures=True)
        if self.tracing is not None:
            self.tracing.close()


async def _apart(generated: AsyncGenerator[RequestDelta, None]) -> AsyncGenerator[RequestDelta, None]:
    async with aclosing(generated) as deltas:
        async for delta in deltas:
            for one in one_by_one(delta):
                yield one


def short_way(text: RequestText, timer: RequestTimer, outlet: Outlet) -> Plain:
    """What `Service.generate` does with plain tokens while its reader waits. With a thousand streams each object that a token touches is
    fetched anew, so they are few."""
    push: Callable[[Sequence[int]], str | None] | None = None

    def plain(token_ids: Sequence[int] | RequestDelta) -> bool:
        nonlocal push
        connection = outlet.connection
        if not connection.writable:
            return False
        if isinstance(token_ids, RequestDelta):
            return _several(token_ids, text, timer, outlet)
        if push is None:
            push = text.push_plain
        if (new := push(token_ids)) is None:  # its end
            return False
        if event := outlet.event(new, token_ids):
            connection.write_chunk(event)
        timer.plain_step(len(token_ids))
        return True

    return plain


def _several(delta: RequestDelta, text: RequestText, timer: RequestTimer, outlet: Outlet) -> bool:
    if outlet.several is None or text.searches:
        return False
    parts = text.push(delta)
    if event := outlet.several(parts):
        outlet.connection.write_chunk(event)
    timer.step(parts)
    return True


def _checked(delta: RequestDelta) -> RequestDelta:
    for part in delta.sequences:
        if part.finish_reason is FinishReason.ERROR:
            raise error_of(delta)
    return delta
