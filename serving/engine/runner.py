"""One rank's side of a step: slots, page copies, packing, forward, sampling; starts the work and hands back what to wait for."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal

import numpy as np
import torch
from pagoda.hal.comm import Communicator
from pagoda.hal.device import Device
from pagoda.hal.errors import PagodaError
from pagoda.hal.memory import MemoryKind
from pagoda.hal.stream import Stream
from pagoda.hal.table import KernelTable
from pagoda.models.model import Model
from pagoda.serving.engine.adapter_store import AdapterStore
from pagoda.serving.engine.batch import BatchPacker, Bucket, StepBatch
from pagoda.serving.engine.burst_steps import Burst
from pagoda.serving.engine.capture_plan import Job
from pagoda.serving.engine.captured import CapturedSteps
from pagoda.serving.engine.cascade import FEWEST_ROWS
from pagoda.serving.engine.dummies import WARM_KINDS, WARM_PROMPTS, WARM_SAMPLING, WARM_WHOLE, Dummies
from pagoda.serving.engine.embeddings import EmbeddingStore
from pagoda.serving.engine.encoding import encoder_batch
from pagoda.serving.engine.forward import Forward
from pagoda.serving.engine.graph_mode import GraphMode
from pagoda.serving.engine.layout import HEADER_WORDS
from pagoda.serving.engine.leftovers import Leftovers
from pagoda.serving.engine.pages import Pages
from pagoda.serving.engine.params import LogprobsMode
from pagoda.serving.engine.plan import CaptureReport, Captures, PageCopies, RunnerFacts, StepPlan, StepResult, Unseen
from pagoda.serving.engine.rare_columns import EDIT_BUCKETS
from pagoda.serving.engine.results import Pending, PromptLogprobs, ResultCopier
from pagoda.serving.engine.sampler import Logprobs, Sampled, Sampler
from pagoda.serving.engine.settings import SamplingSlots, Use
from pagoda.serving.engine.transfer.shelves import Shelf

log = logging.getLogger("pagoda.engine")

PROMPT_CHUNK = 256
"""Rows whose logits exist at the same time when prompt logprobs are made."""

COPIES = 8
"""Pages copied at a time where shapes are static."""


@dataclass(frozen=True)
class RunnerLimits:
    """The largest step: sequences at once, tokens of a step, tokens of a sequence, and steps in flight."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    in_flight: int = 2


Executed = tuple[Sampled, tuple[PromptLogprobs, ...], list[torch.Tensor]]
"""What a step gave on the device: its samples, scores of prompts, and states of tapped layers and chosen experts, where asked for."""


class Runner:
    """Runs step plans on one device, in order.

    Args:
        device, table: where, and the kernels of sampling.
        model: loaded, bound to `pages`.
        pages: the KV pool.
        facts: what the scheduler is told; of bursts the runner knows itself.
        limits: sizes of the stable buffers.
        reload: loads the model again after its weights were released, or None.
        communicator: of the ranks, left when the runner is closed.
        adapters: this rank's, or None where they are not enabled.
        shelf: makes this rank's part of a store of pages, on the stream of its steps.
        graphs: what is captured of a step. logprobs: see `Sampler`.
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
        communicator: Communicator | None = None,
        adapters: AdapterStore | None = None,
        shelf: Callable[[Stream], Shelf] | None = None,
        graphs: GraphMode = "full",
        logprobs: LogprobsMode = "raw_logprobs",
    ) -> None:
        self.device, self.pages, self.limits = device, pages, limits
        self._reload, self._communicator, self._adapters = reload, communicator, adapters
        self._stream = device.stream()
        self._shelf = shelf(self._stream) if shelf is not None else None
        vocab, rows = model.facts.vocab_size, limits.max_num_seqs
        self._slots = SamplingSlots(rows, vocab)
        self._sampler = Sampler(device, table, vocab, rows, logprobs)
        self._forward = Forward(device, model, self._sampler, rows)
        self._captured = CapturedSteps(device, self._forward, pages, rows, limits.max_model_len, communicator, graphs)
        size = _step_bytes(pages, limits) + (_whole_bytes(rows, vocab) if device.graphs.policy.static_shapes else 0)
        widths = pages.table_widths(limits.max_model_len)
        self._static = device.graphs.policy.static_shapes
        inside = self._sampler.masks_inside
        self._packer = BatchPacker(device, pages.written, self._slots, size, limits.in_flight, pages.crossed, widths, inside)
        # The later steps of a burst count positions on: they know one an axis.
        burst = self._captured.burst if facts.media is None or facts.media.axes == 1 else Burst()
        self.facts = replace(facts, burst_steps=burst.steps, burst_rows=burst.rows)
        self._copier = ResultCopier(device, 2 * rows * burst.steps, limits.in_flight)
        self._media = self._embedding_store(model, rows)
        self._leftovers = Leftovers(device)
        self._dummies = Dummies(pages, rows, limits.max_num_batched_tokens, limits.max_model_len, facts.encoder is not None)
        self._told = Captures()
        device.synchronize()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Pending:
        """Start a step; its values are there when `Pending.wait` returns. Raises what the device raises."""
        with self._stream:
            unseen = self._prepare(plan)
            as_it_is = bool(plan.taps) or plan.routed is not None or self._slots.score_prompt(plan.slots, plan.starts)
            as_it_is |= plan.media is not None
            bucket = None if as_it_is else self._bucket(plan)
            batch = self._packer.pack(plan, bucket, self._media.extras(plan) if self._media is not None else None)
            sampled, prompts, states = self._execute(plan, batch, padded=bucket is not None)
            self._leftovers.after(plan.num_tokens)
            asked = self._slots.rows_with(plan.slots[batch.samples.rows], Use.LOGPROBS)
            pending = self._copier.start(self._stream, plan, batch.samples, sampled, asked, prompts, states)
            told = self._captures_to_tell()
            return replace(pending, unseen=unseen, captures=told) if unseen or told else pending

    def warm_up(self) -> None:
        """Before the first request: kernels, with the largest prompt step, so that what it needs is there, and what is captured first.
        Nothing on devices that run steps as they are, where a first step costs no more than a later one."""
        limits = self.limits
        wanted = self._captured.want(limits.max_num_seqs, limits.max_num_batched_tokens, self._adapters is not None)
        if not wanted.first:
            return
        self.pages.clear()
        if whole := self._captured.whole_buckets(limits.max_num_batched_tokens):
            self._warm_up_whole(tuple(dict.fromkeys(job.bucket.rows or 1 for job in wanted.first if not job.prompts)), whole)
            return
        self._warm_kernels()
        for job in wanted.first:
            self._record(job) if self._captured.lazy else self.run(self._dummies.of(job))
        self._told = self._captured.counts
        if self._captured.lazy:
            self.facts = replace(self.facts, captures=self._told)
            log.info("captured %d steps; %d more in idle moments and as they are needed", *self._told)

    def _warm_kernels(self) -> None:
        """Steps as they are, of every kind of kernel; where all is captured beforehand, whatever their sizes are padded to."""
        captured, most = self._captured, self.limits.max_num_seqs
        longest = min(self.limits.max_num_batched_tokens, self.limits.max_model_len)
        for adapted, params in product((False,) if self._adapters is None else (False, True), WARM_KINDS):
            large = () if captured.lazy and params.greedy else ((1, longest), (1, longest // 8))
            for rows, length in (*large, *WARM_PROMPTS):
                self.run(self._dummies.plan(min(rows, most), max(1, min(length, longest // rows)), params, adapted))
            if captured.lazy and params.greedy and (beginning := captured.shared_beginning(min(FEWEST_ROWS, most))):
                self.run(self._dummies.of(Job(Bucket(FEWEST_ROWS, FEWEST_ROWS), False, 0, adapted, beginning)))
        for params in WARM_SAMPLING:
            self.run(self._dummies.plan(1, min(17, longest), params, False))
        captured.clear_asked()

    @torch.inference_mode()
    def capture_next(self) -> CaptureReport:
        """Capture what is next in order; while no sequence has a slot, since the step's rows take those. After an error nothing more is
        captured ahead of need, once `undo_capture` was called on every rank."""
        job, error = self._captured.next(), None
        if job is not None:
            try:
                self._record(job)
                self.device.synchronize()
            except (PagodaError, RuntimeError) as failed:
                error = str(failed)
        self._told = self._captured.counts
        return CaptureReport(self._told, None if job is None else str(job), error)

    def undo_capture(self) -> None:
        """Forget what was captured last: another rank could not."""
        self._captured.undo()

    @torch.inference_mode()
    def _record(self, job: Job) -> None:
        plan = replace(self._dummies.of(job), capture=True)
        with self._stream:
            self._prepare(plan)
            bucket = self._bucket(plan)
            if bucket is None:
                return
            batch = self._packer.pack(plan, bucket, self._media.extras(plan) if self._media is not None else None)
            self._captured.record(batch, self._packer.generation)
        self._stream.record().wait()  # before the buffer is written again

    def _bucket(self, plan: StepPlan) -> Bucket | None:
        use = self._slots.uses(plan.slots[plan.sampled]) | (Use.ALLOWED if plan.mask_rows is not None else 0)
        return self._captured.bucket(plan, use)

    def _captures_to_tell(self) -> Captures | None:
        counts = self._captured.counts
        if not self._captured.lazy or counts == self._told:
            return None
        self._told = counts
        return counts

    def _warm_up_whole(self, rows: tuple[int, ...], whole: tuple[Bucket, ...]) -> None:
        """Where shapes are static, every program that a step may need: nothing is compiled afterwards."""
        most = self.limits.max_num_seqs
        for adapted in (False,) if self._adapters is None else (False, True):
            for params in WARM_WHOLE:
                plans = [self._dummies.plan(min(size, most), 1, params, adapted) for size in rows]
                plans += [self._dummies.prompts(bucket, params, adapted) for bucket in (() if params.greedy else whole)]
                for plan in plans:
                    self.run(plan)
                    self.run(plan)  # what the first one made is there now
        zeros = np.zeros(1, np.int64)
        for _ in range(2):
            self.run(replace(self._dummies.plan(1, 1, WARM_WHOLE[0], False), copies=PageCopies(zeros, zeros)))

    def run(self, plan: StepPlan) -> StepResult:
        """Start a step and wait for it."""
        return self.launch(plan).wait()

    @torch.inference_mode()
    def store(self, action: str, **arguments: Any) -> Any:
        """Call a method of this rank's `Shelf`."""
        with self._stream:
            return getattr(self._shelf, action)(**arguments)

    def release(self, kind: Literal["kv", "weights"]) -> None:
        """Drop the bytes of the pool or of the weights (sleep); no step may run before `restore`."""
        self.device.synchronize()
        self._captured.clear()
        if kind == "kv":
            self.device.memory.release(MemoryKind.KV)
        else:
            # Kernels keep weights in forms of their own, so the model goes as a whole.
            del self._forward.model
            gc.collect()
        self.device.memory.trim()

    def restore(self, kind: Literal["kv", "weights"]) -> None:
        """Give released bytes back: an empty pool, or the weights read again."""
        if kind == "kv":
            self.device.memory.restore(MemoryKind.KV)
            self.pages.clear()
        elif self._reload is not None:
            self._forward.model = self._reload()
        self.pages.bind(self._forward.model)
        self.device.synchronize()

    def close(self) -> None:
        """Give the device's memory back; nothing may be called afterwards."""
        self.device.synchronize()
        self._captured.clear()
        if self._communicator is not None:
            self._communicator.close()
        memory = self.device.memory
        vars(self).clear()
        gc.collect()
        memory.trim()

    def load_adapter(self, number: int, path: str) -> tuple[str, int] | PagodaError:
        """See `AdapterStore.load`."""
        assert self._adapters is not None
        return self._adapters.load(number, path)

    def drop_adapter(self, number: int) -> None:
        """Forget an adapter on the host; no step may place it any more."""
        assert self._adapters is not None
        self._adapters.drop(number)

    def memory(self) -> dict[str, int]:
        """Bytes in use by purpose."""
        return dict(self.device.memory.stats().used)

    def _prepare(self, plan: StepPlan) -> dict[bytes, Unseen]:
        """What goes before the forward. Returns `StepResult.unseen`."""
        unseen: dict[bytes, Unseen] = {}
        for placement in plan.placements:
            assert self._adapters is not None
            self._adapters.place(self._forward.model.adapters, placement)
        for admission in plan.admissions:
            self._slots.admit(admission)
            self._sampler.admit(admission)
            self._forward.admit(admission)
            self._close()
            if self._media is not None:
                self._media.admit(admission)
        if plan.media is not None:
            assert self._media is not None
            unseen = self._media.encode(self._forward.model, plan.media)
        if self._slots.uses(plan.slots) & Use.BAD_WORDS:
            self._slots.observe(plan.slots, plan.starts, plan.lengths, plan.token_ids)
        if plan.copies is not None and len(plan.copies.source):
            self._copy_pages(plan.copies)
        if plan.encodes:
            self._forward.model.encode(encoder_batch(plan.encodes, self.pages.groups, self.device.torch_device))
        return unseen

    def _embedding_store(self, model: Model, slots: int) -> EmbeddingStore | None:
        media = self.facts.media
        if media is None:
            return None
        store = EmbeddingStore(self.device, media, self.facts.media_rows, slots, getattr(torch, model.facts.dtype))
        self._forward.embeddings = store.rows
        return store

    def _close(self) -> None:
        """Where shapes are static: what was submitted is a program of its own, whatever comes before or after it."""
        if self._static:
            self._stream.record()

    def _copy_pages(self, copies: PageCopies) -> None:
        there = self.device.torch_device
        source, target = copies
        if self._static:  # padded with copies of page 0 to itself
            size = -(-len(source) // COPIES) * COPIES
            source, target = (np.pad(pages, (0, size - len(pages))) for pages in copies)
        step = COPIES if self._static else max(1, len(source))
        for at in range(0, len(source), step):
            self.pages.copy(*(torch.from_numpy(pages[at : at + step]).to(there) for pages in (source, target)))
            self._close()

    def _execute(self, plan: StepPlan, batch: StepBatch, padded: bool) -> Executed:
        if padded:
            return self._captured(batch, self._packer.generation, plan.capture), (), []
        tensors = self._forward(batch)
        states = [each for each in (tensors.taps, tensors.routed) if each is not None]
        return tensors.sampled, self._prompt_logprobs(plan, tensors.hidden), states

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
            self._sampler.logprobs(self._forward.model.logits(hidden[at : at + PROMPT_CHUNK]), tokens[at : at + PROMPT_CHUNK], k)
            for at in range(0, len(tokens), PROMPT_CHUNK)
        ]
        return Logprobs(*(torch.cat(columns) for columns in zip(*parts)))


def _step_bytes(pages: Pages, limits: RunnerLimits) -> int:
    """Enough for a step of the largest size without rare columns; the packer grows beyond."""
    per_token = 8 * (1 + len(pages.groups)) + 2 * 4
    tables = sum(4 * width for width in pages.table_widths(limits.max_model_len))
    return 8 * HEADER_WORDS + limits.max_num_batched_tokens * per_token + limits.max_num_seqs * (tables + 128) + 4096


def _whole_bytes(rows: int, vocab: int) -> int:
    """Enough for the rare columns of steps with static shapes."""
    return 2 * rows * ((vocab + 31) // 32 * 4 + 64) + EDIT_BUCKETS[-1] * 20 + 4096
