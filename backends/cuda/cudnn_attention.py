"""Paged attention whose prompts go through cuDNN, where FlashInfer is absent; decodes are Triton's, which splits their keys.

cuDNN reads pages as they lie, and the rows and query tokens that a graph has too many cost next to nothing: few graphs serve all steps,
captured ones too, which bring no more than lengths. Imported when the kernel is resolved, so its frontend is an optional package.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, NamedTuple

import cudnn
import numpy as np
import torch
from numpy.typing import NDArray
from pagoda.hal.kernel import PlainKernel
from pagoda.ops.attention import AttentionFacts, PagedBatch
from pagoda.ops.triton.paged_attention import PagedAttention, Part, results
from pagoda.ops.triton.prompt_inputs import prompt_inputs

FEWEST = 1024
"""Prompt tokens of a step from which cuDNN is the faster one (`benchmarks/gpu_attention.py --kernels triton,cudnn`)."""
NARROW = 64
"""Query tokens of the longest request below which tiles of 128 are mostly empty: drafts that are verified, ends of prompts."""
ROWS, QUERIES, PAGES = 4, 1024, 16
"""Graphs of steps that are not captured are made for the next power of two, and at least so many."""


class Of(IntEnum):
    """Names of a graph's tensors."""

    Q, K, V, OUT, Q_STARTS, OUT_STARTS, QUERIES, KEYS, K_TABLE, V_TABLE = range(1, 11)


@dataclass
class Prompts:
    """The prompts of a step.

    Attributes:
        tokens: query tokens, 0 where there is nothing to do. Of a replayed step each plan changes it.
        queries: most of a request. table: `[R, W]` int32, rows behind the prompts' being anybody's.
        lengths: `[3, R + 1]` int32 on the device: where query tokens begin, how many there are, how many keys; 0 for those that are no
            prompts. staging: on the host, of a replayed step.
    """

    tokens: int
    queries: int
    table: torch.Tensor
    lengths: torch.Tensor
    staging: torch.Tensor | None = None


class StepParts(NamedTuple):
    """A step's prompts, and its decodes behind them as Triton's parts; `covered` where both write every token. copied: of a replayed step,
    when its last lengths are on the device."""

    prompts: Prompts | None
    rest: tuple[Part, ...]
    covered: bool
    copied: torch.cuda.Event | None = None


class Shape(NamedTuple):
    """What a graph is made for; strides are of rows and heads, of pages also of their tokens."""

    rows: int
    queries: int
    width: int
    pages: int
    q: tuple[int, ...]
    out: tuple[int, ...]
    k: tuple[int, ...]
    v: tuple[int, ...]


class CudnnAttention(PlainKernel):
    """`run(q, k_pages, v_pages, batch, plan, sinks, slopes)`, as in `ops.attention.PagedAttentionReference`; values behind the last key of
    a prompt's last page become zeros.

    The first plan of a replayed step is of the largest that it may serve, to be captured; with that as `buffers` it is this step's.
    """

    facts: AttentionFacts
    fewest, narrow = FEWEST, NARROW

    def __init__(self, facts: AttentionFacts) -> None:
        super().__init__(facts)
        self._rest = PagedAttention(facts)
        self._graphs: dict[Shape, tuple[Any, torch.Tensor]] = {}
        self._handle: Any = None

    def plan(self, batch: PagedBatch, buffers: StepParts | None = None) -> StepParts:
        """Prompts are planned on the host from exact lengths; a batch that lacks them, or has few, goes to Triton as a whole."""
        prompts = batch.lengths.prompts if batch.lengths is not None else 0
        if batch.replayed and batch.max_query > 1:
            return self._replayed(batch) if buffers is None else self._replanned(batch, prompts, buffers)
        tokens = int(batch.lengths.query_start[prompts]) if batch.lengths is not None else 0
        if batch.lengths is None or self._few(batch, tokens):
            plan = self._rest.plan(batch)
            return StepParts(None, plan.parts, plan.covered)
        lengths = np.zeros((3, _room(prompts, ROWS) + 1), np.int32)
        _fill(lengths, batch, prompts)
        table = batch.block_table.new_zeros(lengths.shape[1] - 1, _room(batch.block_table.shape[1], PAGES))
        table[:prompts, : batch.block_table.shape[1]] = batch.block_table[:prompts]
        there = torch.from_numpy(lengths).to(table.device, non_blocking=True)
        planned = Prompts(tokens, _room(int(lengths[1].max()), QUERIES), table, there)
        rest = self._rest.plan(batch.rows(prompts), after=tokens).parts if prompts < len(batch.lengths.seq_lens) else ()
        return StepParts(planned, rest, int(batch.lengths.query_start[-1]) == batch.slots.shape[0])

    def run(
        self, q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, batch: PagedBatch, plan: StepParts | None = None,
        sinks: torch.Tensor | None = None, slopes: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        plan = plan or self.plan(replace(batch, lengths=None))
        out = results(q, batch, self.facts, plan.covered)
        if plan.prompts is not None and plan.prompts.tokens:
            self._attend(q, k_pages, v_pages, out, plan.prompts)
        for part in plan.rest:
            self._rest.run_part(part, q[part.tokens], k_pages, v_pages, out[part.tokens], sinks, slopes)
        return out

    def _few(self, batch: PagedBatch, tokens: int) -> bool:
        return tokens < self.fewest or batch.max_query < self.narrow

    def _replayed(self, batch: PagedBatch) -> StepParts:
        """A plan in buffers that stay, of a prompt that fills the step, as far as a table reaches."""
        tokens, requests, table = batch.slots.shape[0], batch.seq_lens.shape[0], batch.block_table
        if self._few(batch, tokens):
            plan = self._rest.plan(batch)
            return StepParts(None, plan.parts, plan.covered)
        staging = torch.zeros(3, requests + 1, dtype=torch.int32, pin_memory=table.device.type == "cuda")
        longest = min(tokens, table.shape[1] * self.facts.page_size)
        staging[0, 1:], staging[1:, 0] = longest, longest
        prompts = Prompts(tokens, tokens, table, staging.to(table.device), staging)
        single = self._rest.part(batch, slice(0, tokens), single=True)
        return StepParts(prompts, (single,), False, torch.cuda.Event())

    def _replanned(self, batch: PagedBatch, prompts: int, plan: StepParts) -> StepParts:
        """The same plan, from now on for this step."""
        if plan.prompts is None:
            return plan
        assert batch.lengths is not None and plan.copied is not None and plan.prompts.staging is not None
        # The staging of the last plan is free when it has crossed, which it has when its step runs.
        plan.copied.synchronize()
        _fill(plan.prompts.staging.numpy(), batch, prompts)
        plan.prompts.lengths.copy_(plan.prompts.staging, non_blocking=True)
        plan.prompts.tokens = int(batch.lengths.query_start[prompts])
        plan.copied.record()
        return plan

    def _attend(self, q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, out: torch.Tensor, prompts: Prompts) -> None:
        rows, width = prompts.table.shape
        shape = Shape(
            rows, prompts.queries, width, len(k_pages), q.stride()[:2], out.stride()[:2], k_pages.stride()[:3], v_pages.stride()[:3]
        )
        if self._handle is None:
            self._handle = cudnn.create_handle()
        if q.is_cuda:
            cudnn.set_stream(handle=self._handle, stream=torch.cuda.current_stream(q.device).cuda_stream)
        if shape not in self._graphs:
            graph = self._graph(shape)
            self._graphs[shape] = graph, torch.empty(max(graph.get_workspace_size(), 1), dtype=torch.uint8, device=q.device)
        graph, workspace = self._graphs[shape]
        starts = prompt_inputs(v_pages, prompts.table, prompts.lengths, q.stride(0), out.stride(0))
        tensors = {
            Of.Q: q, Of.K: k_pages, Of.V: v_pages, Of.OUT: out, Of.K_TABLE: prompts.table, Of.V_TABLE: prompts.table,
            Of.Q_STARTS: starts[0], Of.OUT_STARTS: starts[1], Of.QUERIES: prompts.lengths[1], Of.KEYS: prompts.lengths[2],
        }  # fmt: skip
        graph.execute({int(name): tensor for name, tensor in tensors.items()}, workspace, handle=self._handle)

    def _graph(self, shape: Shape) -> Any:
        """Takes 50 ms, the first of a kind a second."""
        facts, kinds = self.facts, cudnn.data_type
        dtype = {"bfloat16": kinds.BFLOAT16, "float16": kinds.HALF}[facts.dtype]
        graph = cudnn.pygraph(io_data_type=dtype, intermediate_data_type=kinds.FLOAT, compute_data_type=kinds.FLOAT, handle=self._handle)

        def tensor(name: Of, sizes: tuple[int, ...], strides: tuple[int, ...], kind: Any, **more: Any) -> Any:
            return graph.tensor(name=name.name, dim=list(sizes), stride=list(strides), data_type=kind, uid=int(name), **more)

        def heads(strides: tuple[int, ...]) -> tuple[int, ...]:
            return shape.queries * strides[0], strides[1], strides[0], 1

        def pages(name: Of, strides: tuple[int, ...]) -> Any:
            sizes = (shape.pages, facts.num_kv_heads, facts.page_size, facts.head_dim)
            return tensor(name, sizes, (strides[0], strides[2], strides[1], 1), dtype)

        each, ends = ((rows, 1, 1, 1) for rows in (shape.rows, shape.rows + 1))
        starts = [tensor(name, ends, (1, 1, 1, 1), kinds.INT64) for name in (Of.Q_STARTS, Of.OUT_STARTS)]
        queries, keys = (tensor(name, each, (1, 1, 1, 1), kinds.INT32) for name in (Of.QUERIES, Of.KEYS))
        tables = [
            tensor(name, (shape.rows, 1, shape.width, 1), (shape.width, shape.width, 1, 1), kinds.INT32)
            for name in (Of.K_TABLE, Of.V_TABLE)
        ]
        sizes = (shape.rows, facts.num_heads, shape.queries, facts.head_dim)
        out, _ = graph.sdpa(
            q=tensor(Of.Q, sizes, heads(shape.q), dtype, ragged_offset=starts[0]), k=pages(Of.K, shape.k), v=pages(Of.V, shape.v),
            is_inference=True, attn_scale=facts.scale, use_padding_mask=True, seq_len_q=queries, seq_len_kv=keys,
            diagonal_alignment=cudnn.diagonal_alignment.BOTTOM_RIGHT, diagonal_band_right_bound=0,
            diagonal_band_left_bound=facts.window, paged_attention_k_table=tables[0], paged_attention_v_table=tables[1],
            paged_attention_max_seq_len_kv=shape.width * facts.page_size, name="attention",
        )  # fmt: skip
        out.set_output(True).set_dim(list(sizes)).set_stride(list(heads(shape.out))).set_data_type(dtype)
        out.set_ragged_offset(starts[1]).set_uid(int(Of.OUT))
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A])
        graph.check_support()
        graph.build_plans()
        return graph


class CudnnAlways(CudnnAttention):
    """The same however few tokens prompts have, to compare."""

    fewest, narrow = 1, 1


def _fill(lengths: NDArray[np.int32], batch: PagedBatch, prompts: int) -> None:
    """The lengths of a step's prompts, as `Prompts` has them."""
    assert batch.lengths is not None
    starts = batch.lengths.query_start[: prompts + 1]
    lengths[0], lengths[1:] = starts[-1], 0
    lengths[0, : prompts + 1], lengths[1, :prompts], lengths[2, :prompts] = starts, np.diff(starts), batch.lengths.seq_lens[:prompts]


def _room(size: int, least: int) -> int:
    return max(least, 1 << max(size - 1, 0).bit_length())
