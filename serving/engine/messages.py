"""What crosses between a client and the engine: `EngineRequest` in, `RequestDelta`s out. Plain records, msgpack-able."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple

from pagoda.hal.errors import PagodaError, RequestError
from pagoda.models.encoding import EncoderFacts
from pagoda.models.media import EMBEDS, MediaItem, MediaPositions
from pagoda.serving.engine.histograms import Told
from pagoda.serving.engine.params import LogprobsMode, SamplingParams
from pagoda.serving.engine.pooling import Pooled, PoolingFacts, PoolingParams


class FinishReason(StrEnum):
    """Why a sequence ended; the values are the protocol's words."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    REPETITION = "repetition"


class TokenLogprobs(NamedTuple):
    """Of one position: the token's own logprob and rank (from 1), and the most likely ones, descending."""

    token_id: int
    logprob: float
    rank: int
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


@dataclass(frozen=True)
class EncoderPrompt:
    """What the encoder of an encoder-decoder model reads: token ids, or numbers.

    Attributes:
        token_ids: of a text.
        features: float32, little-endian, of `shape`: `[bins, frames]` of spectra, `[samples]` of sound.
    """

    token_ids: tuple[int, ...] = ()
    features: bytes = b""
    shape: tuple[int, ...] = ()

    @property
    def count(self) -> int:
        """Ids, frames or samples."""
        return self.shape[-1] if self.shape else len(self.token_ids)


@dataclass(frozen=True)
class EngineRequest:
    """A request as the engine sees it: token ids, no text.

    Attributes:
        request_id: unique among live requests.
        prompt: token ids, at least one.
        params: see `SamplingParams`; stop strings are the frontend's business (it aborts the sequence), ids the engine's.
        eos_ids: end tokens of the model; ignored where `params.ignore_eos`.
        priority: lower runs first under the priority policy.
        cache_salt: prefix-cache entries are shared only among equal salts.
        adapter: name of a loaded adapter; part of the block hash.
        beam_width: 0 samples; above, beam search returns `params.n` best of so many beams.
        length_penalty: beam scores are divided by length ** this.
        arrival: seconds since the epoch.
        pooling: the answer is pooled of the prompt instead of generated; `params` then matter no more.
        media: what stands for some of the prompt's tokens, in their order. positions: of models with several a token.
        encoder: what the model's encoder reads, where it has one; `prompt` is then the decoder's.
    """

    request_id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    eos_ids: tuple[int, ...] = ()
    priority: int = 0
    cache_salt: str | None = None
    adapter: str | None = None
    beam_width: int = 0
    length_penalty: float = 1.0
    arrival: float = 0.0
    pooling: PoolingParams | None = None
    media: tuple[MediaItem, ...] = ()
    positions: MediaPositions | None = None
    encoder: EncoderPrompt | None = None

    @property
    def spoken(self) -> bool:
        """The prompt's ids are tokens, rather than places of embeddings."""
        return not (self.media and self.media[0].modality == EMBEDS)


@dataclass(frozen=True)
class SequenceDelta:
    """New tokens of one of a request's sequences.

    Attributes:
        index: which of the `n` sequences.
        token_ids: tokens since the last delta. On stop by id the stop token is included.
        logprobs: one entry per token where asked for.
        finish_reason: set on the last delta of the sequence.
        stop_reason: the stop token id that ended it (end tokens give None).
        cumulative_logprob: of a finished beam.
    """

    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    cumulative_logprob: float | None = None


@dataclass(frozen=True)
class RequestDelta:
    """What a step gave one request, or several steps while its reader was busy.

    Attributes:
        finished: no further delta follows.
        cached_tokens: prompt tokens that a prefix hit saved; set on the first delta.
        queued: seconds from submission until the request first got a place in a step; set on the first delta.
        prompt_logprobs: of prompt positions 1.., set once, where asked for.
        error: set when `finish_reason` is ERROR: what went wrong, for the client. refused: it is the request's own fault.
        pooled: the whole answer of a pooling request.
    """

    request_id: str
    sequences: tuple[SequenceDelta, ...]
    finished: bool = False
    cached_tokens: int = 0
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    error: str | None = None
    refused: bool = False
    pooled: Pooled | None = None
    queued: float = field(default=0.0, compare=False)


def one_by_one(delta: RequestDelta) -> Iterator[RequestDelta]:
    """A delta of one sequence as one for each of its tokens, as if they had come so."""
    part, count = delta.sequences[0], len(delta.sequences[0].token_ids)
    if count < 2:
        yield delta
        return
    going_on = replace(part, finish_reason=None, stop_reason=None, cumulative_logprob=None)
    first, later = replace(delta, finished=False), RequestDelta(delta.request_id, ())
    last = replace(delta, cached_tokens=0, prompt_logprobs=None, queued=0.0)
    for place, token in enumerate(part.token_ids):
        ends = place == count - 1
        entries = part.logprobs[place : place + 1] if part.logprobs is not None else None
        piece = replace(part if ends else going_on, token_ids=(token,), logprobs=entries)
        yield replace(last if ends else later if place else first, sequences=(piece,))


def error_of(delta: RequestDelta) -> PagodaError:
    """What a delta with an ERROR among its ends is to the client."""
    told = delta.error or "the engine failed this request without saying why"
    return RequestError(told) if delta.refused else PagodaError(told)


@dataclass(frozen=True)
class StepDeltas:
    """What one step gave all requests. Most rows of a decode step have one new token and nothing else to say: those cross in two
    flat lists, and the client process makes `RequestDelta`s of them (`iter`), so that the engine builds no object per request.

    Attributes:
        request_ids, token_ids: equally long: requests of one sequence that got a token, and the token; one that got several is there
            as often, in order.
        others: every other delta: first and last ones, those with logprobs, those of several sequences.
    """

    request_ids: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    others: list[RequestDelta] = field(default_factory=list)

    def __iter__(self) -> Iterator[RequestDelta]:
        for request_id, token in zip(self.request_ids, self.token_ids, strict=True):
            yield RequestDelta(request_id, (SequenceDelta(0, (token,)),))
        yield from self.others

    def __len__(self) -> int:
        return len(self.request_ids) + len(self.others)


@dataclass(frozen=True)
class EngineStats:
    """A snapshot for `/metrics`, the page and the log; counters only grow.

    Attributes:
        running, waiting: requests now.
        pages_total, pages_used, pages_cached: the pool; cached pages are free but still hold a known prefix.
        prompt_tokens, generation_tokens, preemptions: counters.
        prefix_queries, prefix_hits: counters of prompt tokens looked up and found.
        external_queries, external_hits: counters of prompt tokens asked of a store beside the pool, and brought back.
        drafts, draft_tokens, accepted_tokens: counters of speculation: rows that had drafts, drafts, those that were right; accepted_at:
            the latter by how many drafts deep they were.
        jumped_tokens: counter of tokens that a grammar forced and that took no step of their own.
        steps: steps run. step_ms, host_ms: the last step's wall and host time.
        steps_captured, steps_to_capture: kinds of steps that are captured, and those that will be in idle moments; 0 where each is captured
            when it comes first.
        finished: counters of sequences by why they ended.
        deferred: those of the waiting that wait for something other than room: a grammar, pages from elsewhere, a sibling's prompt.
        adapters_running, adapters_waiting: names of those that requests use and wait with. adapter_slots: how many fit into a step.
        corrupted: counter of requests for which the model gave NaN.
        computed_tokens: counter of prompt tokens of requests that began and that were found nowhere.
        media_queries, media_hits: counters of media items, and of those whose embeddings were there when their request came.
        sleep_level: 0 awake, 1 without the KV pool, 2 without the weights too.
        histograms: see `histograms.BOUNDS`.
    """

    running: int = 0
    waiting: int = 0
    pages_total: int = 0
    pages_used: int = 0
    pages_cached: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    steps: int = 0
    step_ms: float = 0.0
    host_ms: float = 0.0
    external_queries: int = 0
    external_hits: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_at: tuple[int, ...] = ()
    jumped_tokens: int = 0
    steps_captured: int = 0
    steps_to_capture: int = 0
    finished: dict[str, int] = field(default_factory=dict)
    deferred: int = 0
    adapters_running: tuple[str, ...] = ()
    adapters_waiting: tuple[str, ...] = ()
    adapter_slots: int = 0
    corrupted: int = 0
    computed_tokens: int = 0
    media_queries: int = 0
    media_hits: int = 0
    sleep_level: int = 0
    histograms: dict[str, Told] = field(default_factory=dict)


@dataclass(frozen=True)
class EngineFacts:
    """What the frontend must know of a started engine.

    Attributes:
        max_model_len: longest prompt plus output.
        num_pages, tokens_per_page: the KV pool.
        vocab_size: ids at or above are refused.
        kernels: op → chosen kernel names, for `/server_info` and the log.
        device: `DeviceInfo.model` of rank 0.
        load_seconds: how long the parts of rank 0's loading took, in order.
        adapters: (name, folder, parent) of those loaded at start. adapter_slots: 0 where none may be loaded.
        pooling: of a model that answers with vectors or scores; None: it generates.
        modalities: what it takes beside tokens.
        encoder: of a model whose decoder attends to one.
        logprobs: what stands for the logprobs of sampled tokens.
        embeds_width: numbers of a row of a prompt of embeddings; 0 where none are taken.
    """

    max_model_len: int
    num_pages: int
    tokens_per_page: int
    vocab_size: int
    device: str
    kernels: dict[str, str] = field(default_factory=dict)
    adapters: tuple[tuple[str, str, str | None], ...] = ()
    adapter_slots: int = 0
    load_seconds: dict[str, float] = field(default_factory=dict)
    pooling: PoolingFacts | None = None
    modalities: tuple[str, ...] = ()
    encoder: EncoderFacts | None = None
    logprobs: LogprobsMode = "raw_logprobs"
    embeds_width: int = 0
