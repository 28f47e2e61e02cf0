"""One rank's side of a step: slots, page copies, packing, forward, sampling; starts the work and hands back what to wait for."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from pagoda.hal.device import Device
from pagoda.hal.graphs import Replay
from pagoda.hal.memory import MemoryKind
from pagoda.hal.table import KernelTable
from pagoda.models.model import Model, ModelInputs
from pagoda.ops.attention import PagedBatch
from pagoda.serving.engine.batch import BatchPacker, Bucket, StepBatch
from pagoda.serving.engine.layout import HEADER_WORDS
from pagoda.serving.engine.pages import Pages
from pagoda.serving.engine.plan import PageCopies, RunnerFacts, StepPlan, StepResult
from pagoda.serving.engine.results import Pending, PromptLogprobs, ResultCopier
from pagoda.serving.engine.sampler import SPLIT, Logprobs, Sampled, Sampler
from pagoda.serving.engine.settings import SamplingSlots, Use

PROMPT_CHUNK = 256
"""Rows whose logits exist at the same time when prompt logprobs are made."""


@dataclass(frozen=True)
class RunnerLimits:
    """The largest step: sequences at once, tokens of a step, tokens of a sequence, and steps in flight."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    in_flight: int = 2


class Captured(NamedTuple):
    """A replayable step: its replay, and the stable metadata that `Model.plan` writes into."""

    replay: Replay
    plans: tuple[Any, ...]


class StepTensors(NamedTuple):
    """What the forward part of a step leaves: hidden states `[T, width]`, logits `[S, V]`, and the sample where it was fused."""

    hidden: torch.Tensor
    logits: torch.Tensor | None
    sampled: Sampled | None


class Runner:
    """Runs step plans on one device, in order.

    Args:
        device, table: where, and the kernels of sampling.
        model: loaded, bound to `pages`.
        pages: the KV pool.
        facts: what the scheduler was told.
        limits: sizes of the stable buffers.
        reload: loads the model again after its weights were released, or None.
    """

    def __init__(
        self,
        device: Device,
        table: KernelTable,
        model: Model,
        pages: Pages,
        facts: RunnerFacts,
        limits: RunnerLimits,
        reload: Callable[[], Model] | None = None,
    ) -> None:
        self.device, self.model, self.pages, self.facts, self.limits = device, model, pages, facts, limits
        self._reload = reload
        self._stream = device.stream()
        vocab = model.facts.vocab_size
        self._slots = SamplingSlots(limits.max_num_seqs, vocab)
        self._sampler = Sampler(device, table, vocab, limits.max_num_seqs)
        self._packer = BatchPacker(device, pages.page_sizes, self._slots, _step_bytes(pages.page_sizes, limits), limits.in_flight)
        self._copier = ResultCopier(device, 2 * limits.max_num_seqs, limits.in_flight)
        # One place more than there are slots: padding rows leave their tokens there.
        self._last_tokens = device.memory.alloc(MemoryKind.WORK, (limits.max_num_seqs + 1,), torch.int64).zero_()
        self._tables = self._stable_tables()
        self._captured: dict[tuple[object, ...], Captured] = {}
        device.synchronize()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Pending:
        """Start a step; its values are there when `Pending.wait` returns. Raises what the device raises."""
        with self._stream:
            self._prepare(plan)
            bucket = self._bucket(plan)
            batch = self._packer.pack(plan, bucket)
            tensors = self._eager(batch) if bucket is None else self._replay(batch)
            sampled = tensors.sampled or self._sample(tensors.logits, batch)
            rows = self._slots.rows_with(plan.slots[plan.sampled], Use.LOGPROBS)
            prompts = self._prompt_logprobs(plan, tensors.hidden)
            return self._copier.start(self._stream, plan.step, sampled, batch.num_samples, rows, prompts)

    def run(self, plan: StepPlan) -> StepResult:
        """Start a step and wait for it."""
        return self.launch(plan).wait()

    def release(self, kind: Literal["kv", "weights"]) -> None:
        """Drop the bytes of the pool or of the weights (sleep); no step may run before `restore`."""
        self.device.synchronize()
        self._captured.clear()
        if kind == "kv":
            self.device.memory.release(MemoryKind.KV)
        else:
            # Kernels keep weights in forms of their own, so the model goes as a whole.
            del self.model
            gc.collect()
        self.device.memory.trim()

    def restore(self, kind: Literal["kv", "weights"]) -> None:
        """Give released bytes back: an empty pool, or the weights read again."""
        if kind == "kv":
            self.device.memory.restore(MemoryKind.KV)
            self.pages.clear()
        elif self._reload is not None:
            self.model = self._reload()
        self.pages.bind(self.model)
        self.device.synchronize()

    def memory(self) -> dict[str, int]:
        """Bytes in use by purpose."""
        return dict(self.device.memory.stats().used)

    def _prepare(self, plan: StepPlan) -> None:
        for admission in plan.admissions:
            self._slots.admit(admission)
            self._sampler.admit(admission)
        if self._slots.uses(plan.slots) & Use.BAD_WORDS:
            last = np.cumsum(plan.lengths) - 1
            self._slots.observe(plan.slots, plan.starts + plan.lengths - 1, plan.token_ids[last])
        if plan.copies is not None and len(plan.copies.source):
            self._copy_pages(plan.copies)

    def _copy_pages(self, copies: PageCopies) -> None:
        there = self.device.torch_device
        self.pages.copy(torch.from_numpy(copies.source).to(there), torch.from_numpy(copies.target).to(there))

    def _eager(self, batch: StepBatch) -> StepTensors:
        groups = batch.groups()
        hidden = self._forward(batch, groups, self.model.plan(groups))
        return StepTensors(hidden, self._logits(batch, hidden), None)

    def _forward(self, batch: StepBatch, groups: tuple[PagedBatch, ...], plans: tuple[Any, ...]) -> torch.Tensor:
        views = batch.views
        ids = views["token_ids"]
        token_ids = torch.where(ids < 0, self._last_tokens[views["token_slots"]], ids)
        positions = views["positions"]
        inputs = ModelInputs(token_ids, positions[0] if len(positions) == 1 else positions, groups, plans)
        return self.model.forward(inputs).hidden

    def _logits(self, batch: StepBatch, hidden: torch.Tensor) -> torch.Tensor | None:
        rows = batch.views.get("sample_rows")
        if rows is None:
            return None
        return self.model.logits(hidden if batch.uniform and len(rows) == len(hidden) else hidden[rows])

    def _sample(self, logits: torch.Tensor | None, batch: StepBatch) -> Sampled:
        if logits is None:
            nothing = torch.empty(0, dtype=torch.int64, device=self.device.torch_device)
            return Sampled(nothing, nothing.bool())
        sampled = self._sampler(logits, batch)
        self._last_tokens[batch.views["sample_slots"]] = sampled.tokens
        return sampled

    def _prompt_logprobs(self, plan: StepPlan, hidden: torch.Tensor) -> tuple[PromptLogprobs, ...]:
        rows = self._slots.rows_with(plan.slots, Use.PROMPT_LOGPROBS)
        if not len(rows):
            return ()
        firsts = np.cumsum(plan.lengths) - plan.lengths
        found = []
        for row in rows:
            slot = int(plan.slots[row])
            tokens = self._slots.next_prompt_tokens(slot, int(plan.starts[row]), int(plan.lengths[row]))
            if len(tokens):
                first, k = int(firsts[row]), int(self._slots.prompt_top_logprobs[slot])
                values = self._score(hidden[first : first + len(tokens)], torch.from_numpy(tokens), k)
                found.append(PromptLogprobs(int(row), tokens, values))
        return tuple(found)

    def _score(self, hidden: torch.Tensor, tokens: torch.Tensor, k: int) -> Logprobs:
        tokens = tokens.to(self.device.torch_device)
        parts = [
            self._sampler.logprobs(self.model.logits(hidden[at : at + PROMPT_CHUNK]), tokens[at : at + PROMPT_CHUNK], k)
            for at in range(0, len(tokens), PROMPT_CHUNK)
        ]
        return Logprobs(*(torch.cat(columns) for columns in zip(*parts)))

    def _bucket(self, plan: StepPlan) -> Bucket | None:
        """The sizes of the captured step that this one is padded to; None where it runs as it is."""
        policy = self.device.graphs.policy
        uniform = plan.num_tokens == plan.num_rows
        if policy.mode == "eager" or not (uniform or policy.static_shapes):
            return None
        rows = policy.row_bucket(plan.num_rows)
        tokens = rows if uniform else policy.token_bucket(plan.num_tokens)
        if rows not in policy.row_buckets or not (uniform or tokens in policy.token_buckets):
            return None
        return Bucket(tokens, rows)

    def _replay(self, batch: StepBatch) -> StepTensors:
        rows, tokens = len(batch.views["seq_lens"]), len(batch.views["token_ids"])
        fused = not batch.use & SPLIT
        key = (self._packer.generation, tokens, rows, batch.uniform, fused, int(batch.use & (Use.RANDOM | Use.FILTER)) if fused else 0)
        for group, table in enumerate(self._tables):
            staged = batch.views[f"table{group}"]
            table[:rows, : staged.shape[1]].copy_(staged)
        groups = batch.groups(tuple(table[:rows] for table in self._tables), self.limits.max_model_len)
        if key not in self._captured:
            self._captured[key] = self._capture(key, batch, groups, fused)
        captured = self._captured[key]
        self.model.plan(groups, captured.plans)
        tensors: StepTensors = captured.replay()
        return tensors

    def _capture(self, key: tuple[object, ...], batch: StepBatch, groups: tuple[PagedBatch, ...], fused: bool) -> Captured:
        plans = self.model.plan(groups)

        def step(*_: torch.Tensor) -> StepTensors:
            hidden = self._forward(batch, groups, plans)
            logits = self._logits(batch, hidden)
            return StepTensors(hidden, logits, self._sample(logits, batch) if fused else None)

        return Captured(self.device.graphs.capture(key, step, tuple(batch.views.values())), plans)

    def _stable_tables(self) -> tuple[torch.Tensor, ...]:
        if self.device.graphs.policy.mode == "eager":
            return ()
        shapes = [(self.limits.max_num_seqs, -(-self.limits.max_model_len // size)) for size in self.pages.page_sizes]
        return tuple(self.device.memory.alloc(MemoryKind.WORK, shape, torch.int32).zero_() for shape in shapes)


def _step_bytes(page_sizes: tuple[int, ...], limits: RunnerLimits) -> int:
    """Enough for a step of the largest size without rare columns; the packer grows beyond."""
    per_token = 8 * (1 + len(page_sizes)) + 2 * 4
    tables = sum(4 * -(-limits.max_model_len // size) for size in page_sizes)
    return 8 * HEADER_WORDS + limits.max_num_batched_tokens * per_token + limits.max_num_seqs * (tables + 128) + 4096
