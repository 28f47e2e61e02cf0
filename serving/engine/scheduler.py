"""The scheduler: decides who gets how many tokens of each step's budget, and turns the step's result into deltas."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from random import Random

from pagoda.hal.errors import ConfigError, RequestError
from pagoda.serving.engine.adapters import AdapterBook
from pagoda.serving.engine.admission import Admitter
from pagoda.serving.engine.beam_rows import Beams
from pagoda.serving.engine.beams import start_search
from pagoda.serving.engine.bursts import BurstRule
from pagoda.serving.engine.committer import Committer, end_request, end_sequence
from pagoda.serving.engine.config import EngineConfig
from pagoda.serving.engine.crosses import digest_of
from pagoda.serving.engine.fork import fork_sequence
from pagoda.serving.engine.grammar import Grammar, MaskFiller
from pagoda.serving.engine.ledger import Ledger
from pagoda.serving.engine.limits import check_request
from pagoda.serving.engine.media import marks_of
from pagoda.serving.engine.messages import EngineRequest, EngineStats, FinishReason, RequestDelta, StepDeltas
from pagoda.serving.engine.pace import Pace
from pagoda.serving.engine.plan import IntArray, RunnerFacts, StepPlan, StepResult
from pagoda.serving.engine.planner import Planner
from pagoda.serving.engine.pooling import kind_of
from pagoda.serving.engine.prefix import chain_root
from pagoda.serving.engine.sequence import Request, Sequence, State
from pagoda.serving.engine.spec.drafter import Drafter
from pagoda.serving.engine.speculation import Speculator
from pagoda.serving.engine.states import state_group
from pagoda.serving.engine.transfer.connector import CacheConnector


@dataclass(frozen=True)
class SchedulerConfig:
    """What the scheduler takes of `EngineConfig`; the names are the same."""

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    scheduling_policy: str = "fcfs"
    seed: int = 0

    @classmethod
    def of(cls, config: EngineConfig, facts: RunnerFacts | None = None) -> SchedulerConfig:
        """`facts`: of models whose steps take whole prompts, the longest of which must fit."""
        made = cls(**{name: getattr(config, name) for name in cls.__dataclass_fields__})
        if facts is None or not facts.whole_prompts:
            return made
        budget = max(made.max_num_batched_tokens, facts.max_model_len)
        return replace(made, max_num_batched_tokens=budget, enable_chunked_prefill=False, enable_prefix_caching=False)


class Scheduler:
    """One replica's requests. Single-threaded: the engine loop owns it.

    The loop: while `plan()` gives a step, submit it; then `commit` the oldest step in flight. `plan` answers None when there is
    nothing to do now, or when `facts.overlap` steps are in flight. Slots are `0 … max_num_seqs − 1`.

    Args:
        connector: a store of pages beside the pool, asked for what the prefix index lacks.
        drafter: guesses tokens for the ranks to verify, which must do so (`StepPlan.drafts`, `StepResult.counts`).
    """

    def __init__(
        self, config: SchedulerConfig, facts: RunnerFacts, connector: CacheConnector | None = None, drafter: Drafter | None = None
    ) -> None:
        if not config.enable_chunked_prefill and config.max_num_batched_tokens < facts.max_model_len:
            raise ConfigError(
                f"without chunked prefill, max_num_batched_tokens={config.max_num_batched_tokens} must reach"
                f" max_model_len={facts.max_model_len}: raise it, or allow chunked prefill"
            )
        if drafter is not None and drafter.branches and not facts.trees:
            raise ConfigError("drafts that branch need attention that takes trees, and this model's kernels do not; draft chains")
        _check_states(facts, connector, drafter)
        self._config = config
        self._facts = facts
        budget, caching = config.max_num_batched_tokens, config.enable_prefix_caching
        self._ledger = Ledger(facts, config.max_num_seqs, config.scheduling_policy, connector, budget, caching)
        threshold = config.long_prefill_token_threshold
        admitter = Admitter(
            self._ledger,
            caching=config.enable_prefix_caching,
            chunked=config.enable_chunked_prefill,
            threshold=threshold,
            encoder_budget=max(config.max_num_batched_tokens, facts.encoder.longest if facts.encoder is not None else 0),
        )
        masks = MaskFiller(facts.vocab_size)
        self._speculator = Speculator(self._ledger, drafter, masks) if drafter is not None or _verifies(facts) else None
        self._bursts, self._pace = BurstRule(self._ledger, facts), Pace()
        self._planner = Planner(
            self._ledger,
            admitter,
            budget=config.max_num_batched_tokens,
            threshold=threshold if config.enable_chunked_prefill else 0,
            masks=masks,
            bursts=self._bursts,
            pace=self._pace,
            chunked=config.enable_chunked_prefill,
            speculator=self._speculator,
        )
        self._committer = Committer(self._ledger, caching=config.enable_prefix_caching)
        self._in_flight: deque[StepPlan] = deque()
        self._random = Random(config.seed)
        self._submitted = 0

    def submit(self, request: EngineRequest, gates: Iterable[State] = ()) -> None:
        """Queue a request. Raises `RequestError` or `CapacityError` (naming the number that is too big) when it can never fit.

        `gates` are states in which it waits until `open_gate` was called for each (a grammar that compiles, media that is encoded).
        """
        if request.request_id in self._ledger.requests:
            raise RequestError(
                f"request_id {request.request_id!r} is already running; ids of live requests must differ", param="request_id"
            )
        prompt, limit = check_request(request, self._config.max_num_batched_tokens, self._facts, self._ledger)
        live = self._request(request, prompt, limit)
        live.gates.update(gates)
        self._ledger.requests[request.request_id] = live
        self._ledger.counters["prompt_tokens"] += len(request.prompt)
        self._count_media(request)
        if len(live.sequences) > 1:
            self._ledger.spawning.append(live.sequences[0])
        self._queue(live)

    def open_gate(self, request_id: str, gate: State) -> None:
        """What the request waited for in state `gate` is there. Unknown ids are ignored."""
        request = self._ledger.requests.get(request_id)
        if request is not None and gate in request.gates:
            request.gates.remove(gate)
            self._queue(request)

    def give_grammar(self, request_id: str, grammar: Grammar) -> None:
        """What a request in state WAITING_GRAMMAR must match. Unknown ids are ignored."""
        request = self._ledger.requests.get(request_id)
        if request is not None:
            request.grammar = grammar
            self.open_gate(request_id, State.WAITING_GRAMMAR)

    def abort_sequence(self, request_id: str, index: int) -> list[RequestDelta]:
        """End one of a request's sequences now, and the request with its last one. Unknown ones, and beams, are ignored."""
        request = self._ledger.requests.get(request_id)
        if request is None or request.beams is not None or not 0 <= index < len(request.sequences) or not request.sequences[index].live:
            return []
        return [end_sequence(self._ledger, request.sequences[index], FinishReason.ABORT)]

    def abort(self, request_ids: Iterable[str]) -> list[RequestDelta]:
        """End requests now; unknown ids are ignored. Returns their last deltas. Pages are free once steps in flight have committed."""
        found = [self._ledger.requests[name] for name in request_ids if name in self._ledger.requests]
        return [end_request(self._ledger, request, FinishReason.ABORT) for request in found]

    def plan(self, capture: bool = False) -> StepPlan | None:
        """The next step, or None. `capture`: see `StepPlan`."""
        if len(self._in_flight) >= self._facts.overlap:
            return None
        plan = self._planner.plan(idle=not self._in_flight, capture=capture)
        if plan is not None:
            self._in_flight.append(plan)
            self._ledger.counters["steps"] += plan.num_steps
        return plan

    def note_pace(self, plan: StepPlan, step_ms: float) -> None:
        """How long the ranks took for a step (each of a burst), by the clock: steps are cut so that an arriving request does not wait
        long."""
        self._bursts.step_ms = step_ms
        self._pace.note(plan, step_ms)

    def expected_ms(self, plan: StepPlan) -> float:
        """How long the ranks will take for a step, as far as that is known."""
        return self._pace.expected_ms(plan)

    def commit(self, plan: StepPlan, result: StepResult) -> StepDeltas:
        """Take a step's result; steps are committed in the order of their plans."""
        expected = self._in_flight.popleft()
        if expected is not plan or result.step != plan.step:
            raise AssertionError(f"step {plan.step} with result {result.step} committed, step {expected.step} is the oldest in flight")
        if self._speculator is not None and plan.taps:
            self._speculator.observe(plan, result)
        return self._committer.commit(plan, result)

    def fail(self, message: str, request_ids: Iterable[str] | None = None) -> list[RequestDelta]:
        """End requests with ERROR and this message; None: all of them, and forget the steps in flight."""
        chosen = list(self._ledger.requests) if request_ids is None else request_ids
        found = [self._ledger.requests[name] for name in chosen if name in self._ledger.requests]
        deltas = [end_request(self._ledger, request, FinishReason.ERROR, message) for request in found]
        if request_ids is None:
            self._ledger.drop_steps(self._in_flight)
            self._in_flight.clear()
        return deltas

    def fork(self, request_id: str, token: int | None = None, sequence: int = 0, at: int | None = None) -> int:
        """A new sequence that continues a live one, after `token` where given. Returns its index in the request.

        It begins with the parent's output so far (its first `at` tokens where given), shares its pages and copies the last, partial
        one. Raises `RequestError` for a request or sequence that is not alive, has no such token or has no room left.
        """
        request = self._ledger.requests.get(request_id)
        if request is None or request.beams or not 0 <= sequence < len(request.sequences) or not request.sequences[sequence].live:
            raise RequestError(f"request {request_id!r} has no live sequence {sequence} to fork", param="request_id")
        if token is not None and not 0 <= token < self._facts.vocab_size:
            raise RequestError(f"token id {token} is not in the vocabulary of {self._facts.vocab_size}", param="token")
        return fork_sequence(self._ledger, request.sequences[sequence], token, at).index

    def reset_prefix_cache(self) -> bool:
        """Forget all cached pages. False, and nothing forgotten, while requests hold pages."""
        if self._ledger.pool.used:
            return False
        self._ledger.pool.forget()
        if self._ledger.media is not None:
            self._ledger.media.forget()
        return True

    @property
    def adapters(self) -> AdapterBook:
        """The adapters that requests may ask for."""
        return self._ledger.adapters

    def uses_adapter(self, number: int) -> bool:
        """Whether a live request does."""
        return any(request.adapter is not None and request.adapter.number == number for request in self._ledger.requests.values())

    @property
    def has_slots(self) -> bool:
        """Whether a request that comes now could run beside those that do."""
        return self._ledger.slots.free > 0

    @property
    def fills_a_step(self) -> bool:
        """Whether those who wait leave no room in the next step, of tokens or slots, for one who comes now."""
        waiting, running = self._ledger.waiting, len(self._ledger.running)
        return waiting.count >= self._ledger.slots.free or waiting.tokens >= self._config.max_num_batched_tokens - running

    @property
    def has_work(self) -> bool:
        """Whether any request is not finished or any step not committed."""
        return bool(self._ledger.requests or self._in_flight)

    def awaits_first_tokens(self) -> bool:
        """Whether some sequence waits, or runs and has no token of its own yet."""
        ledger, slots = self._ledger, self._ledger.slots
        if ledger.waiting.peek() is not None or ledger.loading or ledger.spawning:
            return True
        return bool((slots.known[ledger.order] <= slots.prompt[ledger.order]).any())

    def stats(self) -> EngineStats:
        """A snapshot; `step_ms` and `host_ms` are the loop's to fill in."""
        ledger, pool = self._ledger, self._ledger.pool
        running = len(ledger.running)
        wait = [sequence for request in ledger.requests.values() for sequence in request.sequences if sequence.live]
        counted = ("prompt_tokens", "generation_tokens", "preemptions", "prefix_queries", "prefix_hits", "steps")
        more = (
            "external_queries",
            "external_hits",
            "drafts",
            "draft_tokens",
            "accepted_tokens",
            "jumped_tokens",
            "corrupted",
            "computed_tokens",
            "media_queries",
            "media_hits",
        )
        return EngineStats(
            running=running,
            waiting=sum(request.unfinished for request in ledger.requests.values()) - running,
            pages_total=pool.num_pages - 1,
            pages_used=pool.used,
            pages_cached=pool.cached,
            deferred=sum(sequence.state.deferred for sequence in wait),
            adapters_running=_adapters(ledger.running),
            adapters_waiting=_adapters(sequence for sequence in wait if sequence.state is not State.RUNNING),
            adapter_slots=self._facts.adapter_slots,
            histograms=ledger.histograms.told(),
            accepted_at=tuple(ledger.accepted_at[place] for place in range(len(ledger.accepted_at))),
            finished=dict(ledger.finished),
            **{name: ledger.counters[name] for name in (*counted, *more)},
        )

    def _request(self, source: EngineRequest, prompt: IntArray, limit: int) -> Request:
        params = source.params
        if params.seed is None:
            params = params.seeded(self._random.getrandbits(63))
        adapter = self._ledger.adapters.find(source.adapter) if source.adapter is not None else None
        extra = (digest_of(source.encoder),) if source.encoder is not None else ()
        root = chain_root(source.cache_salt, adapter.key if adapter is not None else None, extra)
        request = Request(source, params, self._submitted, root, adapter=adapter)
        if source.encoder is not None and self._facts.encoder is not None:
            request.crossed = self._facts.encoder.tokens(source.encoder.count)
        self._submitted += 1
        if source.media:
            request.marks = marks_of(source.media, self._ledger.index.unit)
        request.prompt_logprobs = [] if params.prompt_logprobs is not None else None
        if source.pooling is not None and self._facts.pooling is not None:
            skips = source.pooling.skip_reading_prefix_cache
            request.pools_all = bool(skips) or kind_of(source.pooling, self._facts.pooling.pooler) != "last"
        if source.beam_width:
            search = start_search(source, self._config.max_num_seqs)
            request.params = replace(params, temperature=0.0, n=1, logprobs=min(search.looked_at, self._facts.vocab_size))
            request.beams = Beams(search, params.logprobs)
        count = request.params.n
        epoch = self._ledger.epoch(len(prompt))
        request.sequences = [Sequence(request, index, prompt, limit, State.WAITING_SIBLING, epoch=epoch) for index in range(count)]
        request.born = request.unfinished = count
        return request

    def _count_media(self, request: EngineRequest) -> None:
        if self._ledger.media is not None:
            self._ledger.counters["media_queries"] += len(request.media)
            self._ledger.counters["media_hits"] += sum(self._ledger.media.holds(item.digest) for item in request.media)

    def _queue(self, request: Request) -> None:
        first = request.sequences[0]
        if request.gates:
            first.state = min(request.gates, key=lambda gate: gate.value)
        else:
            self._ledger.waiting.push(first)


def _adapters(sequences: Iterable[Sequence]) -> tuple[str, ...]:
    """Names of those that they want."""
    return tuple(sorted({one.request.adapter.module.name for one in sequences if one.request.adapter is not None}))


def _verifies(facts: RunnerFacts) -> bool:
    """Whether drafts can be taken back, and prompts grow by several tokens in a step."""
    return state_group(facts.groups) is None and facts.length_epochs is None and not facts.whole_prompts


def _check_states(facts: RunnerFacts, connector: CacheConnector | None, drafter: Drafter | None) -> None:
    if facts.encoder is not None and connector is not None:
        raise ConfigError("this model has an encoder and was given a store of pages, which knows no encoders; run it without")
    if state_group(facts.groups) is None:
        return
    if connector is not None:
        raise ConfigError("this model has recurrent layers and was given a store of pages, which knows no states; run it without")
    if drafter is not None and drafter.branches:
        raise ConfigError("this model has recurrent layers, whose states follow one line of drafts; draft chains")
