"""Recurrent state in pages: `StateBatch`, a step's view of it, and the loop over chunks that the references of all recurrences share.

A recurrent layer keeps one state per request, however long it is. A step reads each request's state from one page and writes the new one
to another, or to the same; a page that somebody else may still read is never written. Kernels take the segments of all requests at once
(`query_start`), as attention does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class StateBatch:
    """One layer's view of a step. Request r has query tokens `[query_start[r], query_start[r+1])`; none for padding rows.

    Attributes:
        query_start: `[R + 1]` int32.
        fresh: `[R]` bool: the request begins; its state is zeros, whatever the page holds.
        read, write: `[R]` int64, pages of the state before and after the step. No page that one request writes is read by another;
            padding rows read and write page 0.
        many: requests that may have more than one query token, on the host; they come first.
        max_query: upper bound of query tokens per request, on the host.
    """

    query_start: torch.Tensor
    fresh: torch.Tensor
    read: torch.Tensor
    write: torch.Tensor
    many: int
    max_query: int


def load_state(pages: torch.Tensor, batch: StateBatch, wide: torch.dtype) -> torch.Tensor:
    """`[R, …]`: each request's state before the step."""
    state = pages[batch.read].to(wide)
    return state.masked_fill(batch.fresh.view(-1, *(1 for _ in state.shape[1:])), 0.0)


def owners(query_start: torch.Tensor, tokens: int) -> torch.Tensor:
    """`[T]` int64: the request of each token; padding tokens count as the last request's."""
    token = torch.arange(tokens, device=query_start.device, dtype=query_start.dtype)
    return torch.searchsorted(query_start[1:].contiguous(), token, right=True).clamp(max=query_start.shape[0] - 2)


Body = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""`(state [B, …], *inputs [B, L, …]) → (outputs [B, L, …], state)`; tokens that are zero in every input must leave the state as it is."""


def scan(
    batch: StateBatch, pages: torch.Tensor, inputs: Sequence[torch.Tensor], chunk: int, body: Body, out_shape: tuple[int, ...]
) -> torch.Tensor:
    """Run `body` along the segments of all requests, `chunk` tokens at a time: outputs `[T, *out_shape]`; writes the states.

    Requests of one token go together in one call. Shapes follow from host bounds alone.
    """
    tokens, many = inputs[0].shape[0], batch.many
    wide = inputs[0].dtype
    out = inputs[0].new_zeros(tokens + 1, *out_shape)
    if tokens == 0 or batch.read.shape[0] == 0:
        return out[:tokens]
    state = load_state(pages, batch, wide)
    parts = []
    if many:
        first = state[:many]
        for start in range(0, batch.max_query, chunk):
            length = min(chunk, batch.max_query - start)
            first = _piece(batch.query_start[: many + 1], start, length, inputs, first, body, out)
        parts.append(first)
    if many < state.shape[0]:
        parts.append(_piece(batch.query_start[many:], 0, 1, inputs, state[many:], body, out))
    pages[batch.write] = torch.cat(parts).to(pages.dtype)
    return out[:tokens]


def _piece(
    query_start: torch.Tensor, start: int, length: int, inputs: Sequence[torch.Tensor], state: torch.Tensor, body: Body, out: torch.Tensor
) -> torch.Tensor:
    at = query_start[:-1, None] + start + torch.arange(length, device=query_start.device)
    inside = at < query_start[1:, None]
    index = torch.where(inside, at, 0).long()
    taken = [x[index].masked_fill(~inside.view(*inside.shape, *(1 for _ in x.shape[1:])), 0.0) for x in inputs]
    result, state = body(state, *taken)
    # What lies outside a segment goes to the row after the last token.
    out[torch.where(inside, at, out.shape[0] - 1).long()] = result.to(out.dtype)
    return state
