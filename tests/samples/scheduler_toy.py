"""Simulated ranks for scheduler tests: pages hold, per position, a digest of the tokens up to there, so that every read of a
page can be checked, and the next token is a function of that digest alone."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import numpy as np
from pagoda.hal.kv import CacheGroup, CacheKind, LayerCache
from pagoda.serving.engine.adapters import NO_ADAPTER, AdapterModule, LoadedAdapter
from pagoda.serving.engine.beams import BeamSearch, Candidate, Hypothesis
from pagoda.serving.engine.groups import GroupRule
from pagoda.serving.engine.messages import EngineRequest, FinishReason, RequestDelta
from pagoda.serving.engine.params import SamplingParams
from pagoda.serving.engine.plan import ON_DEVICE, RowLogprobs, RunnerFacts, StepPlan, StepResult
from pagoda.serving.engine.scheduler import Scheduler, SchedulerConfig
from pagoda.serving.engine.spec.drafter import Draft, DraftState
from pagoda.serving.engine.transfer.catalog import HostCatalog
from pagoda.serving.engine.transfer.store import StoreConnector

VOCAB = 50
EOS = 7


def group(tokens_per_page=4, kind=CacheKind.FULL, window=None, layers=(0,)):
    cache = LayerCache(kind, 1, 8, 8, "float32", window)
    return CacheGroup(kind, layers, (cache,) * len(layers), tokens_per_page, 64 * tokens_per_page * len(layers), window)


ADAPTERS = tuple(LoadedAdapter(AdapterModule(name, f"folder-{name}"), number, name, 4) for number, name in enumerate("xyz"))


def toy_facts(groups=None, num_pages=40, max_model_len=64, overlap=2, adapter_slots=0, burst=1):
    adapters = ADAPTERS if adapter_slots else ()
    return RunnerFacts(
        tuple(groups or (group(),)),
        num_pages,
        max_model_len,
        VOCAB,
        "toy",
        overlap,
        adapters=adapters,
        adapter_slots=adapter_slots,
        trees=True,
        burst_steps=burst,
        burst_rows=4,
    )


def digests(params: SamplingParams, tokens) -> list[int]:
    """Digest at each position: what K and V of a real model depend on (an adapter stands in `extra`)."""
    chain, value = [], sum(map(ord, params.extra.get("adapter", "")))
    for token in tokens:
        value = hash((value, int(token), 0x5EED))
        chain.append(value)
    return chain


def next_token(params: SamplingParams, last: int, draw: int, sequence: int) -> int:
    """What the toy model samples after the position whose digest is `last`."""
    value = last if params.greedy else hash((last, params.seed, sequence, draw))
    token = value % VOCAB
    return token if draw >= params.min_tokens or token not in (EOS, *params.stop_token_ids) else (token + 1) % VOCAB


def top_logprobs(last: int, count: int) -> list[tuple[int, float]]:
    """The toy model's most likely tokens, best first: distinct, from the digest."""
    tokens = sorted(range(VOCAB), key=lambda token: hash((last, token)))
    scores = sorted((-0.1 - (hash((last, token, 1)) % 999983) / 400000 for token in tokens), reverse=True)
    return list(zip(tokens, scores))[:count]


def expected_tokens(request: EngineRequest, longest: int, sequence: int = 0, output=()) -> tuple[list[int], FinishReason]:
    """The toy model's answer after `output`, one token at a time with nothing shared, cached or overlapped."""
    params, tokens = request.params, [*request.prompt, *output]
    begun = len(tokens)
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(request.eos_ids))
    limit = longest if params.max_tokens is None else min(longest, len(request.prompt) + params.max_tokens)
    while True:
        draw = len(tokens) - len(request.prompt)
        token = next_token(params, digests(params, tokens)[-1], draw, sequence)
        tokens.append(token)
        if token in stops and draw + 1 >= params.min_tokens:
            return tokens[begun:], FinishReason.STOP
        if len(tokens) >= limit:
            return tokens[begun:], FinishReason.LENGTH


def search_alone(search: BeamSearch, prompt, limit, top):
    """The search with one list of beams and no pages: `top(tokens)` gives (token, logprob) pairs, best first."""
    beams = [(0.0, list(prompt))]
    while True:
        length = len(beams[0][1]) + 1 - len(prompt)
        candidates = [
            Candidate(cumulative + logprob, i, token)
            for i, (cumulative, tokens) in enumerate(beams)
            for token, logprob in top(tokens)[: search.looked_at]
        ]
        turn = search.turn(candidates, last=len(prompt) + length >= limit)
        ended = [([*beams[one.beam][1][len(prompt) :], one.token], one) for one in turn.ending]
        search.complete([Hypothesis(search.score(c.cumulative, length), c.cumulative, tuple(t), c.token in search.ends) for t, c in ended])
        if search.over(turn.living, length):
            return search.finished
        beams = [(one.cumulative, [*beams[one.beam][1], one.token]) for one in turn.living]


def expected_beams(request: EngineRequest, longest: int) -> list[Hypothesis]:
    """The toy model's best `n` beams."""
    params = request.params
    ends = frozenset((*params.stop_token_ids, *(() if params.ignore_eos else request.eos_ids)))
    limit = longest if params.max_tokens is None else min(longest, len(request.prompt) + params.max_tokens)
    search = BeamSearch(request.beam_width, ends, request.length_penalty)
    return search_alone(search, request.prompt, limit, lambda tokens: top_logprobs(digests(params, tokens)[-1], VOCAB))[: params.n]


@dataclass
class ToySlot:
    params: SamplingParams
    prompt: int
    sequence: int
    tokens: list[int]


@dataclass
class ToyRanks:
    """Checks each plan against the steps in flight when it is made, and runs it, late, against the pages."""

    facts: RunnerFacts
    slots: dict[int, ToySlot] = field(default_factory=dict)
    owners: dict[int, int] = field(default_factory=dict)
    pages: dict[int, dict[int, tuple[int, int]]] = field(default_factory=dict)
    in_flight: deque = field(default_factory=deque)
    admitted: int = 0
    placed: dict[int, int] = field(default_factory=dict)

    def __post_init__(self):
        self.rules = [GroupRule.of(one) for one in self.facts.groups]

    def take(self, plan: StepPlan) -> None:
        """Check shapes, and that what this step writes belongs to one sequence, in it and in every step in flight."""
        self._check_shapes(plan)
        for admission in plan.admissions:
            self.admitted += 1
            self.owners[admission.slot] = self.admitted
        reads, writes = self._touched(plan, [self.owners[slot] for slot in plan.slots.tolist()])
        self.in_flight.append((plan, reads))
        for page, owner in writes.items():
            for other, other_reads in self.in_flight:
                assert other_reads.get(page, {owner}) == {owner}, f"page {page} written in step {plan.step}, held by others in {other.step}"

    def _check_shapes(self, plan: StepPlan) -> None:
        assert len(set(plan.slots.tolist())) == plan.num_rows > 0
        assert plan.lengths.min() >= 1 and plan.lengths.sum() == plan.num_tokens
        ones = plan.lengths == 1
        assert not (ones[:-1] & ~ones[1:]).any(), "rows with one token come last"
        for array in (plan.slots, plan.starts, plan.lengths, plan.token_ids, plan.draws, *plan.block_tables):
            assert array.dtype == np.int32
        assert len(plan.block_tables) == len(self.rules)

    def _touched(self, plan: StepPlan, owners: list[int]):
        reads: dict[int, set[int]] = {}
        writes: dict[int, int] = {}
        for table, rule in zip(plan.block_tables, self.rules):
            for row, owner in enumerate(owners):
                start, end = int(plan.starts[row]), int(plan.starts[row] + (plan.lengths if plan.runs is None else plan.runs)[row])
                for index in range(start // rule.tokens_per_page, -(-end // rule.tokens_per_page)):
                    page = int(table[row, index])
                    assert page > 0, "a token would be written to page 0"
                    assert writes.setdefault(page, owner) == owner, f"two sequences write page {page}"
                for page in table[row, rule.first_page(start) : rule.pages(end)].tolist():
                    reads.setdefault(page, set()).add(owner)
        return reads, writes

    def read(self, pages):
        """What a store keeps of one unit."""
        return [[dict(self.pages[page]) for page in held] for held in pages]

    def write(self, pages, kept) -> None:
        """Put it into other pages, which no step in flight may hold."""
        for page, content in [pair for held, copies in zip(pages, kept) for pair in zip(held, copies)]:
            assert all(page not in reads for _, reads in self.in_flight)
            assert all(plan.copies is None or page not in plan.copies.source for plan, _ in self.in_flight)
            self.pages[page] = dict(content)

    def run(self) -> tuple[StepPlan, StepResult]:
        """Run the oldest step in flight."""
        plan, _ = self.in_flight.popleft()
        if plan.runs is None:
            return self._step(plan)
        assert plan.num_tokens == plan.num_rows and plan.sampled.all() and not plan.bound.any() and plan.drafts is plan.masks is None
        tokens = np.full((plan.num_rows, plan.num_steps), -1, np.int32)
        for step in range(plan.num_steps):
            rows = np.flatnonzero(plan.runs > step)
            _, result = self._step(step_of_burst(plan, rows, step))
            assert not (result.logprobs or result.prompt_logprobs)
            tokens[rows, step] = result.tokens[:, 0]
        return plan, StepResult(plan.step, tokens, plan.runs)

    def _step(self, plan: StepPlan) -> tuple[StepPlan, StepResult]:
        self._copy(plan)
        self.placed.update(plan.placements)
        for admission in plan.admissions:
            assert admission.params.seed is not None
            tokens = [*admission.prompt, *admission.output]
            self.slots[admission.slot] = ToySlot(admission.params, len(admission.prompt), admission.sequence, tokens)
        tokens, in_place, logprobs, prompt_logprobs = [], [], {}, {}
        ends = np.cumsum(plan.lengths)
        for row in range(plan.num_rows):
            slot = self.slots[int(plan.slots[row])]
            self._check_adapter(plan, row, slot.params.extra.get("adapter"))
            chain = self._row(plan, row, slot, plan.token_ids[ends[row] - plan.lengths[row] : ends[row]].tolist())
            start, stop = int(plan.starts[row]), min(len(chain), slot.prompt - 1)
            if slot.params.prompt_logprobs is not None and stop > start:
                prompt_logprobs[row] = as_rows([(slot.tokens[p + 1], [], -float(p + 1)) for p in range(start, stop)])
            if plan.sampled[row]:
                drafts = [] if plan.drafts is None else plan.drafts[row][plan.drafts[row] >= 0].tolist()
                run, there = self._sample(plan, row, slot, chain, drafts)
                in_place.append(there)
                if slot.params.logprobs is not None:
                    logprobs[len(tokens)] = as_rows([(token, top_logprobs(chain[-1], slot.params.logprobs), -1.0) for token in run])
                tokens.append(run)
        counts = np.array([len(run) for run in tokens], np.int32)
        table = np.full((len(tokens), max(counts, default=1)), -1, np.int32)
        for line, run in zip(table, tokens):
            line[: len(run)] = run
        there = None if plan.drafts is None else np.array(in_place, np.int32)
        return plan, StepResult(plan.step, table, counts, logprobs, prompt_logprobs, in_place=there)

    def _check_adapter(self, plan: StepPlan, row: int, name: str | None) -> None:
        """The device slot that the row is sent to holds the adapter that its request asked for."""
        where = NO_ADAPTER if plan.adapters is None else int(plan.adapters[row])
        wanted = next((one.number for one in ADAPTERS if one.module.name == name), NO_ADAPTER)
        assert (self.placed[where] if where != NO_ADAPTER else NO_ADAPTER) == wanted

    def _sample(self, plan: StepPlan, row: int, slot: ToySlot, chain: list[int], drafts: list[int]) -> tuple[list[int], int]:
        """What the model says after the row's tokens and after each draft that it says itself; how many of these are in place."""
        first, run, node, there = len(chain) - len(drafts) - 1, [], -1, 0
        assert first + 1 == len(slot.tokens) and int(plan.draws[row]) == len(slot.tokens) - slot.prompt
        parents = [] if plan.parents is None else plan.parents[row].tolist()
        while node is not None:
            run.append(next_token(slot.params, chain[first + 1 + node], int(plan.draws[row]) + len(run), slot.sequence))
            node = next((place for place, draft in enumerate(drafts) if parents[place] == node and draft == run[-1]), None)
            there += node == there == len(run) - 1
        slot.tokens += run
        return run, there

    def _copy(self, plan: StepPlan) -> None:
        if plan.copies is None:
            return
        sources, targets = plan.copies.source.tolist(), plan.copies.target.tolist()
        assert not set(sources) & set(targets) and len(set(targets)) == len(targets)
        for source, target in zip(sources, targets):
            self.pages[target] = dict(self.pages[source])

    def _row(self, plan: StepPlan, row: int, slot: ToySlot, ids: list[int]) -> list[int]:
        start, end = int(plan.starts[row]), int(plan.starts[row] + plan.lengths[row])
        for position, token in enumerate(ids, start):
            if token == ON_DEVICE:
                assert position == len(slot.tokens) - 1 >= slot.prompt, "only the last sampled token is known on the device alone"
            elif plan.bound[row] and position == len(slot.tokens) - 1:
                slot.tokens[position] = token
            elif position < len(slot.tokens):
                assert slot.tokens[position] == token
        drafts = ids[len(slot.tokens) - start :]
        assert not drafts or (plan.drafts is not None and plan.drafts[row][: len(drafts)].tolist() == drafts)
        chain = self._chain(plan, row, slot, drafts, end)
        for number, (table, rule) in enumerate(zip(plan.block_tables, self.rules)):
            for position in range(start, end):
                page = int(table[row, position // rule.tokens_per_page])
                self.pages.setdefault(page, {})[position % rule.tokens_per_page] = (number, chain[position])
            for position in range(int(rule.first_visible(start)), end):
                page = int(table[row, position // rule.tokens_per_page])
                found = self.pages.get(page, {}).get(position % rule.tokens_per_page)
                assert found == (number, chain[position]), (
                    f"{found} {number}: row {row} of step {plan.step} reads a wrong page {page} at position {position}"
                )
        return chain

    def _chain(self, plan: StepPlan, row: int, slot: ToySlot, drafts: list[int], end: int) -> list[int]:
        """The digest that belongs at each place: drafts, each of its own path, after the sequence's tokens."""
        chain, paths = digests(slot.params, slot.tokens[:end]), []
        for place, draft in enumerate(drafts):
            parent = int(plan.parents[row, place])
            assert parent < place
            paths.append([*(paths[parent] if parent >= 0 else []), draft])
            chain.append(digests(slot.params, [*slot.tokens, *paths[-1]])[-1])
        return chain


def step_of_burst(plan: StepPlan, rows, step: int) -> StepPlan:
    """One step of a burst as a plan of its own."""
    adapters = None if plan.adapters is None else plan.adapters[rows]
    tables = tuple(table[rows] for table in plan.block_tables)
    columns = {name: getattr(plan, name)[rows] for name in ("slots", "lengths", "sampled", "bound")}
    ids = plan.token_ids if not step else np.full(len(rows), ON_DEVICE, np.int32)
    once = {} if not step else {"admissions": (), "copies": None, "placements": ()}
    starts, draws = plan.starts[rows] + step, plan.draws[rows] + step
    return replace(plan, starts=starts, draws=draws, token_ids=ids, block_tables=tables, adapters=adapters, runs=None, **columns, **once)


def as_rows(entries) -> RowLogprobs:
    """(token, top, logprob) per position as the ranks' arrays."""
    tops = [top for _, top, _ in entries]
    return RowLogprobs(
        np.array([token for token, _, _ in entries], np.int32),
        np.array([value for _, _, value in entries], np.float32),
        np.ones(len(entries), np.int32),
        np.array([[token for token, _ in top] for top in tops], np.int32).reshape(len(entries), -1),
        np.array([[value for _, value in top] for top in tops], np.float32).reshape(len(entries), -1),
    )


def toy_store(units, read, write, kind=StoreConnector):
    """A store of pages in host memory whose shelf is a dictionary; `read` and `write` are those of `ToyRanks`."""
    shelf = {}

    def post(method, *, keys, pages=(), aside=False):
        assert aside == (method == "fetch")
        if method == "save":
            shelf.update((key, read([held])) for key, held in zip(keys, pages, strict=True))
        elif method == "place":
            for key, held in zip(keys, pages, strict=True):
                write([held], shelf[key])
        done = Future()
        done.set_result(len(keys))
        return [done]

    return kind(HostCatalog(units), post)


class Toy:
    """A scheduler with simulated ranks, and everything that its clients were told. `costs`: milliseconds of a step, of each of its
    decodes and of each token of its prompts; nothing is said of times where there are none."""

    def __init__(self, facts: RunnerFacts | None = None, store=None, drafter=None, costs=None, **config):
        self.costs = costs
        self.facts = facts or toy_facts()
        self.config = SchedulerConfig(**{"max_num_seqs": 4, "max_num_batched_tokens": 16, **config})
        self.ranks = ToyRanks(self.facts)
        self.store = store(self.ranks.read, self.ranks.write) if store is not None else None
        self.scheduler = Scheduler(self.config, self.facts, self.store, drafter)
        self.requests: dict[str, EngineRequest] = {}
        self.tokens: dict[str, dict[int, list[int]]] = {}
        self.reasons: dict[str, dict[int, FinishReason]] = {}
        self.deltas: dict[str, list[RequestDelta]] = {}
        self.ended: list[str] = []
        self.plans: list[StepPlan] = []
        self.broken = False

    def submit(self, request_id, prompt, *, request=None, gates=(), **params):
        params = SamplingParams(**{"temperature": 0.0, "seed": 3, **params})
        made = EngineRequest(request_id, tuple(prompt), params, **{"eos_ids": (EOS,), **(request or {})})
        self.scheduler.submit(made, gates)
        self.requests[request_id] = made
        self.tokens[request_id], self.reasons[request_id], self.deltas[request_id] = {}, {}, []

    def plan(self) -> StepPlan | None:
        self.broken = True
        plan = self.scheduler.plan()
        if plan is not None:
            self.plans.append(plan)
            self.ranks.take(plan)
        self.broken = False
        return plan

    def commit(self):
        self.broken = True
        plan, result = self.ranks.run()
        self.hear(self.scheduler.commit(plan, result))
        if self.costs is not None:
            decodes = int((plan.lengths == 1).sum())
            self.scheduler.note_pace(plan, float(np.dot(self.costs, (1, decodes, plan.num_tokens - decodes))))
        self.check_books()
        self.broken = False

    def step(self) -> bool:
        """One turn of the engine loop: plan as deep as it goes, then commit the oldest step."""
        while self.plan() is not None:
            pass
        if self.ranks.in_flight:
            self.commit()
        return self.scheduler.has_work

    def drain(self, most=2000):
        for _ in range(most):
            if not self.step():
                break
        else:
            raise AssertionError("requests that fit did not end")
        assert self.scheduler.stats().pages_used == 0

    def hear(self, deltas):
        for delta in deltas:
            name = delta.request_id
            assert name not in self.ended, "a delta after the last"
            self.deltas[name].append(delta)
            for part in delta.sequences:
                assert part.index not in self.reasons[name], "a delta after the end of its sequence"
                self.tokens[name].setdefault(part.index, []).extend(part.token_ids)
                if part.finish_reason is not None:
                    self.reasons[name][part.index] = part.finish_reason
            if delta.finished:
                self.ended.append(name)

    def check_books(self):
        """Every page is free, cached or held, as often as block tables hold it."""
        ledger = self.scheduler._ledger
        pool = ledger.pool
        assert pool.used + pool.available == pool.num_pages - 1
        held = np.zeros(pool.num_pages, np.int32)
        for table in ledger.tables.tables:
            np.add.at(held, table[table > 0], 1)
        for plan, _ in self.ranks.in_flight:
            if plan.copies is not None:
                held[np.unique(plan.copies.source)] += 1
        assert (held == pool.references(np.arange(pool.num_pages))).all()
        assert int((held > 0).sum()) == pool.used

    def check_tokens(self, request_id):
        """The request got the toy model's tokens, whatever happened on the way."""
        request = self.requests[request_id]
        if request.beam_width:
            best = expected_beams(request, self.facts.max_model_len)
            assert self.tokens[request_id] == {index: list(one.tokens) for index, one in enumerate(best)}
            return
        for index in range(request.params.n):
            tokens, reason = expected_tokens(request, self.facts.max_model_len, index)
            assert self.tokens[request_id][index] == tokens
            assert self.reasons[request_id][index] is reason


class KnowingDrafter:
    """Guesses what the toy model would say greedily, and one wrong token after `right` right ones."""

    branches, wants, caches = False, (), ()

    def __init__(self, right: int):
        self.right = right

    def propose(self, state: DraftState) -> Draft:
        ids = np.full((len(state.slots), self.right + 1), -1, np.int32)
        for row, (known, room) in enumerate(zip(state.tokens, state.room.tolist())):
            tokens = known.tolist()
            for place in range(min(room, self.right + 1)):
                token = digests(SamplingParams(), tokens)[-1] % VOCAB
                tokens.append((token + (place == self.right)) % VOCAB)
                ids[row, place] = tokens[-1]
        parents = np.broadcast_to(np.arange(-1, self.right, dtype=np.int32), ids.shape)
        return Draft(ids, parents)


class Branching(KnowingDrafter):
    """The same guesses, each beside a wrong one that comes first: what is accepted is not in place."""

    branches = True

    def propose(self, state: DraftState) -> Draft:
        chain = super().propose(state).ids
        count, wide = chain.shape
        ids, parents = np.full((count, 2 * wide), -1, np.int32), np.full((count, 2 * wide), -1, np.int32)
        right = (chain >= 0).sum(1)
        for row in range(count):
            for place in range(min(right[row], int(state.room[row]) // 2)):
                ids[row, 2 * place : 2 * place + 2] = (chain[row, place] + 3) % VOCAB, chain[row, place]
                parents[row, 2 * place : 2 * place + 2] = 2 * place - 1
        return Draft(ids, parents)
