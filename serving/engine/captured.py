"""Replayable steps: one per bucket, made when first needed or at start, run again after their inputs were changed in place."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from pagoda.hal.comm import Communicator
from pagoda.hal.device import Device
from pagoda.hal.graphs import GraphPolicy, Replay
from pagoda.hal.memory import MemoryKind
from pagoda.ops.attention import PagedBatch
from pagoda.serving.engine.batch import Bucket, StepBatch
from pagoda.serving.engine.burst_steps import Burst, BurstViews
from pagoda.serving.engine.cascade import FEWEST_ROWS, FEWEST_TOKENS
from pagoda.serving.engine.forward import Forward
from pagoda.serving.engine.graph_mode import GraphMode, policy_of
from pagoda.serving.engine.pages import Pages
from pagoda.serving.engine.plan import StepPlan
from pagoda.serving.engine.rare_columns import SPLIT
from pagoda.serving.engine.sampler import Sampled
from pagoda.serving.engine.settings import Use

DRAWS = Use.RANDOM | Use.FILTER
"""Uses that change a step without changing the number of its rows."""

FEW_TOKENS = 1024
"""Prompts up to here are captured at start."""

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
"""What a model's layers may ask of its ranks within a step."""


def bucket_of(sizes: tuple[int, ...], wanted: int) -> int | None:
    """The smallest of ascending `sizes` that holds `wanted`."""
    return next((size for size in sizes if size >= wanted), None)


class Captured(NamedTuple):
    """A replay, and the stable metadata that `Model.plan` writes into before each."""

    replay: Replay
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
        self._steps: dict[tuple[object, ...], Captured] = {}
        self._generation = 0
        self._met: set[Bucket] = set()
        self._most = rows
        self._widest = 0
        if self._policy.mode == "eager":
            return
        rows = max(rows, self._policy.row_bucket(rows), bucket_of(self._policy.prompt_rows, rows) or 0)
        alloc = device.memory.alloc
        self._tables = tuple(alloc(MemoryKind.WORK, (rows, width), torch.int32).zero_() for width in pages.table_widths(longest))
        self._widest = max((size for size in self._policy.prompt_rows if size <= rows), default=0)
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

    def clear(self) -> None:
        """Forget all: addresses that they used have changed."""
        self._steps.clear()

    def bucket(self, plan: StepPlan) -> Bucket | None:
        """The sizes that a step is padded to; None where it runs as it is."""
        policy = self._policy
        uniform = plan.num_tokens == plan.num_rows
        if policy.mode == "eager" or plan.drafts is not None:
            return None
        if not (uniform or policy.static_shapes):
            return self._prompt_bucket(plan)
        rows = policy.row_bucket(plan.num_rows if uniform else self._most)
        tokens = rows if uniform else policy.token_bucket(plan.num_tokens)
        rows = min(rows, tokens)
        if rows not in policy.row_buckets or not (uniform or tokens in policy.token_buckets):
            return None
        return Bucket(tokens, rows)

    def _prompt_bucket(self, plan: StepPlan) -> Bucket | None:
        """Sizes that come once are not worth a capture, and those with the most rows, captured at start, hold fewer; prompts that are run
        whole have their bounds on the host."""
        if self._forward.model.facts.whole_prompts:
            return None
        tokens = bucket_of(self._policy.prompt_tokens, plan.num_tokens)
        rows = bucket_of(self._policy.prompt_rows, plan.num_rows)
        if tokens is None or rows is None or rows > self._rows:
            return None
        bucket, wide = Bucket(tokens, rows), Bucket(tokens, self._widest)
        met = bucket in self._met
        if not met and wide in self._met:
            return wide
        self._met.add(bucket)
        return bucket if met else None

    def meet(self, bucket: Bucket) -> None:
        """A step with prompts of this size is captured the first time that it comes."""
        self._met.add(bucket)

    def prompt_buckets(self, tokens: int, rows: int) -> tuple[Bucket, ...]:
        """What is captured at start of steps with prompts: those of `tokens`, the most of a step, with up to `rows` rows, all sizes with
        the most rows, and those of few tokens and rows, for which a first request should not wait longer than later ones."""
        sizes, policy = bucket_of(self._policy.prompt_tokens, tokens), self._policy
        most = bucket_of(policy.prompt_rows, rows) or 0
        if policy.mode == "eager" or not policy.at_start or sizes is None:
            return ()
        largest = [Bucket(sizes, size) for size in policy.prompt_rows if size <= min(most, tokens)]
        fewest = policy.prompt_rows[0]
        few = [Bucket(size, fewest) for size in policy.prompt_tokens if fewest <= size <= min(FEW_TOKENS, tokens) and fewest <= most]
        # Met first, those with few rows are captured as they are, and do not go to those with the most.
        wide = [Bucket(size, most) for size in reversed(policy.prompt_tokens) if most and 2 * most <= size < sizes and size % most == 0]
        return tuple(dict.fromkeys((*largest, *few, *wide)))

    def shared_beginning(self, rows: int) -> int:
        """Tokens of the shortest beginning with which a decode step of so many rows is worth a warm-up; 0 for none. Kernels are
        the same for any number of rows, and what is captured later takes less than a tenth of a second: powers of two will do."""
        takes = (
            self._policy.shared
            and rows >= FEWEST_ROWS
            and not rows & (rows - 1)
            and self._longest > FEWEST_TOKENS
            and self._pages.num_pages > 1
        )
        return FEWEST_TOKENS if takes else 0

    def row_buckets(self, most: int) -> tuple[int, ...]:
        """Sizes to capture at start, decode steps up to `most` rows; largest first: later ones then fit into the memory of earlier ones."""
        policy = self._policy
        if policy.mode == "eager" or not policy.at_start:
            return ()
        used = {policy.row_bucket(rows) for rows in range(1, most + 1)}
        return tuple(sorted(used & set(policy.row_buckets), reverse=True))

    def whole_buckets(self, tokens: int) -> tuple[Bucket, ...]:
        """All sizes that steps with prompts can have where shapes are static, with up to `tokens` tokens."""
        policy = self._policy
        if policy.mode == "eager" or not (policy.static_shapes and policy.at_start):
            return ()
        rows, most = policy.row_bucket(self._most), policy.token_bucket(tokens)
        return tuple(Bucket(size, min(size, rows)) for size in policy.token_buckets if 1 < size <= most)

    def __call__(self, batch: StepBatch, generation: int) -> Sampled:
        """Run a padded step. `generation` changes when the step's buffers moved."""
        if generation != self._generation:
            self.clear()
            self._generation = generation
        rows = len(batch.views["seq_lens"])
        for group, table in enumerate(self._tables):
            staged = batch.views[f"table{group}"]
            table[:rows, : staged.shape[1]].copy_(staged)
        groups = batch.groups(tuple(table[:rows] for table in self._tables), self._longest)
        fused = self._samples_inside(batch)
        key = self._key(batch, fused)
        captured = self._steps.get(key) or self._capture(key, batch, groups, fused)
        if batch.burst is not None:
            return self._replay_all(captured, batch.burst, groups, rows)
        self._forward.model.plan(groups, captured.plans)
        given: Sampled = captured.replay()
        if fused:
            return given
        assert self._logits is not None
        return self._forward.sample(self._logits[:rows], batch)

    def _samples_inside(self, batch: StepBatch) -> bool:
        if not batch.use & SPLIT or self._forward.sampler.reads_masks(batch):
            return True
        # Where shapes are static, all rows do all of it; what takes long to compile is made once for both kinds of steps.
        return self._policy.static_shapes and self._policy.mode == "captured"

    def _replay_all(self, captured: Captured, burst: BurstViews, groups: tuple[PagedBatch, ...], rows: int) -> Sampled:
        """One step after the other, each with its own inputs; what each gave is put aside before the next."""
        words = self._run[: 2 * rows * (len(burst.later) + 1)].view(-1, 2, rows)
        given = self._words[: 2 * rows].view(2, rows)
        self._forward.model.plan(groups, captured.plans)  # of all steps: what it looks at is the same in each
        for step, kept in enumerate(words.unbind(0)):
            if step:
                burst.live.copy_(burst.later[step - 1])
            captured.replay()
            kept.copy_(given)
        return Sampled(words[0, 0], words[0, 1], words=words)

    def _key(self, batch: StepBatch, fused: bool) -> tuple[object, ...]:
        shape = (
            len(batch.views["token_ids"]),
            len(batch.views["seq_lens"]),
            batch.uniform,
            batch.every_row_sampled,
            "adapters" in batch.views,
            fused,
            batch.shared,
        )
        if not fused:
            return (*shape, int(batch.use & Use.RANDOM))  # which decides where the step's arrays lie
        if batch.use & SPLIT & ~Use.ALLOWED:
            return (*shape, batch.layout.dims, batch.use, batch.top_logprobs)
        return (*shape, batch.use & (DRAWS | Use.ALLOWED))

    def _capture(self, key: tuple[object, ...], batch: StepBatch, groups: tuple[PagedBatch, ...], fused: bool) -> Captured:
        plans = self._forward.model.plan(groups)
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

        # Making a step replayable may run it, and a step moves the state on.
        state = [self._forward.last_tokens, *self._forward.sampler.state()]
        before = [tensor.clone() for tensor in state]
        recurrent = self._pages.states_written([group.block_table for group in groups])
        replay = self._device.graphs.capture(key, step, tuple(batch.views.values()))
        for tensor, old in zip(state, before):
            tensor.copy_(old)
        self._pages.put_back(recurrent)
        captured = self._steps[key] = Captured(replay, plans)
        return captured

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
