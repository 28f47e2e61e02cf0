"""Replayable steps: one per bucket, made before the first request, while nobody asks for anything or when needed, and run again after
their inputs were changed in place."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from pagoda.hal.comm import Communicator
from pagoda.hal.device import Device
from pagoda.hal.errors import PagodaError
from pagoda.hal.graphs import GraphPolicy, Replay
from pagoda.hal.memory import MemoryKind
from pagoda.ops.attention import PagedBatch
from pagoda.serving.engine.batch import Bucket, StepBatch
from pagoda.serving.engine.burst_steps import Burst, BurstViews
from pagoda.serving.engine.capture_plan import DRAWS, PADDING, SPREAD, Job, Wanted, bucket_of, nearly_as_good, wanted_captures
from pagoda.serving.engine.cascade import FEWEST_ROWS, FEWEST_TOKENS
from pagoda.serving.engine.forward import Forward
from pagoda.serving.engine.graph_mode import GraphMode, policy_of
from pagoda.serving.engine.pages import Pages
from pagoda.serving.engine.plan import Captures, StepPlan
from pagoda.serving.engine.rare_columns import SPLIT
from pagoda.serving.engine.sampler import Sampled
from pagoda.serving.engine.settings import Use

log = logging.getLogger("pagoda.engine")

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
"""What a model's layers may ask of its ranks within a step."""


class Key(NamedTuple):
    """What tells captured steps apart. kind: what is sampled, as far as the step does it."""

    tokens: int
    rows: int
    uniform: bool
    every_row_sampled: bool
    adapters: bool
    fused: bool
    shared: tuple[bool, ...]
    kind: tuple[object, ...]


class Captured(NamedTuple):
    """A replay, or the step itself while there is none, and the stable metadata that `Model.plan` writes into before each."""

    replay: Replay | Callable[[], Sampled]
    plans: tuple[Any, ...]


class CapturedSteps:
    """What a device with captured or traced steps runs; decode steps, steps with prompts where the device's policy has sizes for them,
    and on devices with static shapes all steps.

    A step whose sampling depends on how many rows want what ends with its logits; the sampler then runs after the replay. Other
    steps sample inside. Results are copied into buffers that all buckets share, so that a bucket keeps no output of its own.

    Args:
        forward: runs a step as it is; what is captured.
        pages: the pool. rows: most rows of a step. longest: most tokens of a sequence.
        group: the ranks; steps run as they are where its collectives cannot sit inside captured ones.
        mode: what is captured of a step. Raises `ConfigError` where the device cannot do it so.
    """

    def __init__(
        self, device: Device, forward: Forward, pages: Pages, rows: int, longest: int, group: Communicator | None = None,
        mode: GraphMode = "full",
    ) -> None:  # fmt: skip
        self._device, self._forward, self._pages, self._longest = device, forward, pages, longest
        captured = forward.model.facts.replayable and (group is None or all(map(group.capturable, COLLECTIVES)))
        policy = policy_of(mode, device.graphs, device.info.model)
        self._policy = policy if captured else GraphPolicy()
        self.lazy = self._policy.mode == "captured" and self._policy.at_start and not self._policy.static_shapes
        self._steps: dict[Key, Captured] = {}
        self._sharing: dict[Key, frozenset[tuple[bool, ...]]] = {}
        self._alone, self._may_capture = group is None, True
        self._last: Key | None = None
        self._wanted, self._queue, self._asked = Wanted(), deque[Job](), set[Key]()
        self._generation = 0
        self._met: set[Bucket] = set()
        self._most = rows
        if self._policy.mode == "eager":
            return
        rows = max(rows, self._policy.row_bucket(rows), bucket_of(self._policy.prompt_rows, rows) or 0)
        alloc = device.memory.alloc
        self._tables = tuple(alloc(MemoryKind.WORK, (rows, width), torch.int32).zero_() for width in pages.table_widths(longest))
        # In the words that go to the host, so that nothing is left to convert behind a replay.
        self._rows = rows
        self._words = alloc(MemoryKind.WORK, (2 * rows,), torch.int32).zero_()
        self._run = alloc(MemoryKind.WORK, (max(1, self.burst.steps) * 2 * rows,), torch.int32).zero_()
        self._logits: torch.Tensor | None = None

    @property
    def burst(self) -> Burst:
        """The longest burst and its most rows."""
        policy = self._policy
        return Burst() if policy.mode == "eager" else Burst(policy.burst, max(policy.row_buckets, default=0))

    @property
    def counts(self) -> Captures:
        """What is captured and what is still to be, where that is done ahead of need."""
        return Captures(len(self._steps), len(self._queue))

    def want(self, rows: int, tokens: int, adapters: bool) -> Wanted:
        """What to capture for the largest step, one by one where that is done ahead of need; `next` gives what comes later."""
        beginning = self.shared_beginning(min(rows, FEWEST_ROWS))
        self._wanted = wanted_captures(self._policy, rows, tokens, self.lazy, adapters, beginning)
        self._queue = deque(self._wanted.later)
        return self._wanted

    def next(self) -> Job | None:
        """What to capture next, of steps that are not captured yet; what was asked for in vain comes first."""
        while self._queue:
            if self._key_of(job := self._queue.popleft()) not in self._steps:
                return job
        return None

    def clear_asked(self) -> None:
        """Begin again with what is wanted: what was asked for until now was nobody's."""
        self._asked.clear()
        self._queue = deque(self._wanted.later)

    def undo(self) -> None:
        """Forget what was captured last, and capture nothing more: another rank could not."""
        if self._last is not None:
            self._steps.pop(self._last, None)
        self._end()

    def _end(self) -> None:
        self._may_capture = False
        self._queue.clear()
        self._wanted = Wanted()

    def clear(self) -> None:
        """Forget all: addresses that they used have changed."""
        self._steps.clear()
        self._sharing.clear()
        self._asked.clear()
        self._queue = deque((*self._wanted.first, *self._wanted.later) if self.lazy else ())

    def bucket(self, plan: StepPlan, use: int = 0) -> Bucket | None:
        """The sizes that a step is padded to; None where it runs as it is. `use`: what its sampled rows need of the sampler."""
        policy = self._policy
        uniform = plan.num_tokens == plan.num_rows
        if policy.mode == "eager" or plan.drafts is not None:
            return None
        padded = uniform or policy.static_shapes
        sizes = self._sizes(plan, uniform) if padded else self._prompt_sizes(plan)
        if sizes is None or not self.lazy:
            return sizes if padded or sizes is None else self._met_before(sizes)
        return self._ready(plan, sizes, use, uniform)

    def _sizes(self, plan: StepPlan, uniform: bool) -> Bucket | None:
        policy = self._policy
        rows = policy.row_bucket(plan.num_rows if uniform else self._most)
        tokens = rows if uniform else policy.token_bucket(plan.num_tokens)
        rows = min(rows, tokens)
        if rows not in policy.row_buckets or not (uniform or tokens in policy.token_buckets):
            return None
        return Bucket(tokens, rows)

    def _prompt_sizes(self, plan: StepPlan) -> Bucket | None:
        """Prompts that are run whole have their bounds on the host."""
        if self._forward.model.facts.whole_prompts:
            return None
        tokens = bucket_of(self._policy.prompt_tokens, plan.num_tokens)
        rows = bucket_of(self._policy.prompt_rows, plan.num_rows)
        return None if tokens is None or rows is None or rows > self._rows else Bucket(tokens, rows)

    def _met_before(self, sizes: Bucket) -> Bucket | None:
        """Sizes that come once are not worth a capture."""
        met = sizes in self._met
        self._met.add(sizes)
        return sizes if met else None

    def _ready(self, plan: StepPlan, sizes: Bucket, use: int, uniform: bool) -> Bucket | None:
        """Where steps are captured ahead of need: a captured size for the step, or its own where it is to be captured or, a decode step,
        has none. One capture of a step with prompts serves rows of all temperatures and filters: there are many sizes of these."""
        more = 0 if uniform else DRAWS
        every, adapted = uniform and bool(plan.sampled.all()), plan.adapters is not None
        found = self._standing_in(sizes, plan.num_tokens, use | more, (uniform, every, adapted))
        near = found is not None and not uniform and nearly_as_good(found, sizes)
        if plan.capture and self._may_capture and not near:
            return replace(sizes, use=more)
        if not near:
            self._ask(sizes, uniform, every, adapted, use | more)
        return found if found is not None or not uniform else replace(sizes, use=more)

    def _standing_in(self, sizes: Bucket, tokens: int, use: int, kind: tuple[bool, bool, bool]) -> Bucket | None:
        """The smallest captured size that takes the step, its own if that is one. kind: see `_key`."""
        uniform, every, adapted = kind
        more = 0 if uniform else DRAWS
        for each in self._larger(sizes, tokens, uniform):
            for draws in (more, more | Use.RANDOM, DRAWS):
                key = self._key(each, uniform, every, adapted, use | draws)
                if key in self._steps:
                    return replace(each, use=draws, share=self._sharing.get(key, frozenset()))
        return None

    def _larger(self, sizes: Bucket, tokens: int, uniform: bool) -> Iterable[Bucket]:
        """Sizes that a step may be padded to rather than run as it is, smallest first."""
        policy = self._policy
        assert sizes.rows is not None and sizes.tokens is not None
        if uniform:
            return (Bucket(size, size) for size in policy.row_buckets if sizes.rows <= size <= SPREAD * sizes.rows)
        most = tokens + max(tokens, PADDING)
        fits = [size for size in policy.prompt_tokens if size == sizes.tokens or sizes.tokens < size <= most]
        rows = [size for size in policy.prompt_rows if sizes.rows <= size <= self._rows]
        return (Bucket(size, count) for size in fits for count in rows)

    def _ask(self, sizes: Bucket, uniform: bool, every: bool, adapted: bool, use: int) -> None:
        """Capture it next, if it is not."""
        key = self._key(sizes, uniform, every, adapted, use)
        if key in self._steps or key in self._asked or every is not uniform or not self._may_capture:
            return
        self._asked.add(key)
        self._queue.appendleft(Job(sizes, not uniform, use & (DRAWS | SPLIT), adapted))

    def _ask_alike(self, key: Key, batch: StepBatch) -> None:
        """Capture next the form for rows that begin as those of a step which was run without it."""
        key = key._replace(shared=batch.alike)
        wanted = batch.alike != batch.shared and key.every_row_sampled and self.lazy and self._may_capture
        if not wanted or key in self._asked or key in self._steps:
            return
        self._asked.add(key)
        if beginning := self.shared_beginning(key.rows):
            sizes = Bucket(key.tokens, key.rows)
            self._queue.appendleft(Job(sizes, False, batch.use & (DRAWS | SPLIT), key.adapters, beginning, batch.alike))

    def _key(self, sizes: Bucket, uniform: bool, every: bool, adapted: bool, use: int) -> Key:
        """That of a step whose rows share nothing."""
        assert sizes.tokens is not None and sizes.rows is not None
        fused = self._fused(use)
        kind = (use & DRAWS,) if fused else (use & Use.RANDOM,)  # which decides where the step's arrays lie
        return Key(sizes.tokens, sizes.rows, uniform, every, adapted, fused, (False,) * len(self._tables), kind)

    def _key_of(self, job: Job) -> Key | None:
        if job.shared:
            return None
        return self._key(job.bucket, not job.prompts, not job.prompts, job.adapted, job.use | (DRAWS if job.prompts else 0))

    def shared_beginning(self, rows: int) -> int:
        """Tokens of the shortest beginning with which a decode step of so many rows is worth a warm-up; 0 for none."""
        takes = self._policy.shared and rows >= FEWEST_ROWS and self._longest > FEWEST_TOKENS and self._pages.num_pages > 1
        return FEWEST_TOKENS if takes else 0

    def __call__(self, batch: StepBatch, generation: int, capture: bool = False) -> Sampled:
        """Run a padded step. `generation` changes when the step's buffers moved. `capture`: see `StepPlan`."""
        groups = self._groups(batch, generation)
        rows = len(batch.views["seq_lens"])
        fused = self._samples_inside(batch)
        key = self._key_for(batch, fused)
        captured = self._steps.get(key)
        if captured is None and (capture or not self.lazy) and self._may_capture:
            captured = self._try_to_capture(key, batch, groups, fused)
        if captured is not None:
            self._forward.model.plan(groups, captured.plans)
            self._ask_alike(key, batch)
        else:
            # The first plan of a step that is replayed is for what captures it.
            plans = self._forward.model.plan(groups, self._forward.model.plan(groups))
            captured = Captured(self._step(batch, groups, plans, fused), plans)
        if batch.burst is not None:
            return self._replay_all(captured, batch.burst, rows)
        given: Sampled = captured.replay()
        if fused:
            return given
        assert self._logits is not None
        return self._forward.sample(self._logits[:rows], batch)

    def whole_buckets(self, tokens: int) -> tuple[Bucket, ...]:
        """All sizes that steps with prompts can have where shapes are static, with up to `tokens` tokens."""
        policy = self._policy
        if policy.mode == "eager" or not (policy.static_shapes and policy.at_start):
            return ()
        rows, most = policy.row_bucket(self._most), policy.token_bucket(tokens)
        return tuple(Bucket(size, min(size, rows)) for size in policy.token_buckets if 1 < size <= most)

    def record(self, batch: StepBatch, generation: int) -> None:
        """Capture a padded step, unless it is: what it gives is nobody's, so it is not run."""
        self._last = None
        groups = self._groups(batch, generation)
        fused = self._samples_inside(batch)
        if (key := self._key_for(batch, fused)) not in self._steps:
            self._capture(key, batch, groups, fused)

    def _fused(self, use: int) -> bool:
        """Whether the step samples. Where shapes are static, all rows do all of it; what takes long to compile is made once for both
        kinds of steps."""
        return not use & SPLIT or (self._policy.static_shapes and self._policy.mode == "captured")

    def _samples_inside(self, batch: StepBatch) -> bool:
        return self._fused(batch.use) or self._forward.sampler.reads_masks(batch)

    def _groups(self, batch: StepBatch, generation: int) -> tuple[PagedBatch, ...]:
        if generation != self._generation:
            if self._steps:
                self.clear()
            self._generation = generation
        rows = len(batch.views["seq_lens"])
        for group, table in enumerate(self._tables):
            staged = batch.views[f"table{group}"]
            table[:rows, : staged.shape[1]].copy_(staged)
        return batch.groups(tuple(table[:rows] for table in self._tables), self._longest)

    def _replay_all(self, captured: Captured, burst: BurstViews, rows: int) -> Sampled:
        """One step after the other, each with its own inputs; what each gave is put aside before the next. What `Model.plan`
        looks at is the same in each."""
        words = self._run[: 2 * rows * (len(burst.later) + 1)].view(-1, 2, rows)
        given = self._words[: 2 * rows].view(2, rows)
        for step, kept in enumerate(words.unbind(0)):
            if step:
                burst.live.copy_(burst.later[step - 1])
            captured.replay()
            kept.copy_(given)
        return Sampled(words[0, 0], words[0, 1], words=words)

    def _key_for(self, batch: StepBatch, fused: bool) -> Key:
        sizes = Bucket(len(batch.views["token_ids"]), len(batch.views["seq_lens"]))
        key = self._key(sizes, batch.uniform, batch.every_row_sampled, "adapters" in batch.views, batch.use)
        if any(batch.shared):
            key = key._replace(shared=batch.shared)
        if fused and self._forward.sampler.reads_masks(batch):
            return key._replace(fused=True, kind=(batch.use & (DRAWS | Use.ALLOWED),))
        return key._replace(kind=(batch.layout.dims, batch.use, batch.top_logprobs)) if fused and batch.use & SPLIT else key

    def _try_to_capture(self, key: Key, batch: StepBatch, groups: tuple[PagedBatch, ...], fused: bool) -> Captured | None:
        """Where it can run as it is and no other rank captures it too, a step need not be captured."""
        try:
            return self._capture(key, batch, groups, fused)
        except (PagodaError, RuntimeError) as error:
            if not (self.lazy and self._alone):
                raise
            self._end()
            log.warning("steps that are not captured yet run as they are from now on: %s", error)
            return None

    def _capture(self, key: Key, batch: StepBatch, groups: tuple[PagedBatch, ...], fused: bool) -> Captured:
        plans = self._forward.model.plan(groups)
        step = self._step(batch, groups, plans, fused)
        # Making a step replayable may run it, and a step moves the state on.
        state = [self._forward.last_tokens, *self._forward.sampler.state()]
        before = [tensor.clone() for tensor in state]
        try:
            with self._pages.states_apart([group.block_table for group in groups]):
                replay = self._device.graphs.capture(key, step, tuple(batch.views.values()))
        finally:
            for tensor, old in zip(state, before):
                tensor.copy_(old)
        captured = self._steps[key] = Captured(replay, plans)
        self._last = key
        if any(key.shared):
            plain = key._replace(shared=(False,) * len(key.shared))
            self._sharing[plain] = self._sharing.get(plain, frozenset()) | {key.shared}
        return captured

    def _step(self, batch: StepBatch, groups: tuple[PagedBatch, ...], plans: tuple[Any, ...], fused: bool) -> Callable[..., Sampled]:
        """What is captured, and what is run where nothing is."""
        if not fused and self._logits is None:
            shape = (self._rows, self._forward.model.facts.vocab_size)
            self._logits = self._device.memory.alloc(MemoryKind.WORK, shape, torch.float32)

        def step(*_: torch.Tensor) -> Sampled:
            hidden = self._forward.hidden(batch, groups, plans)
            logits = self._forward.logits(batch, hidden)
            if logits is None:
                return self._forward.nothing()
            if fused:
                return self._keep(self._forward.sample(logits, batch))
            self._keep_logits(logits)
            return self._forward.nothing()

        return step

    def _keep(self, sampled: Sampled) -> Sampled:
        rows = len(sampled.tokens)
        words = self._words[: 2 * rows].view(1, 2, rows)
        tokens, bad = words[0]
        tokens.copy_(sampled.tokens)
        bad.copy_(sampled.bad)
        return Sampled(tokens, bad, sampled.logprobs, words if sampled.logprobs is None else None)

    def _keep_logits(self, logits: torch.Tensor) -> None:
        assert self._logits is not None
        self._logits[: len(logits)].copy_(logits)
