"""Tokens of an image see each other in both directions: as requests of their own (`span_batch`), against a mask written out."""

from __future__ import annotations

import pytest
import torch
from pagoda.ops.attention import AttentionFacts, PagedAttentionReference, PagedBatch, Spans, span_batch

PAGE, HEADS, DIM = 4, 2, 8


@pytest.mark.parametrize("window", [None, 3])
def test_tokens_of_a_span_see_it_whole_and_what_they_saw_before(window: int | None) -> None:
    """Two requests, the second of which has a prefix of three tokens in pages already; a span of the first and two of the second, one right
    behind the other, lie in this step."""
    generator = torch.Generator().manual_seed(0)
    lengths, queries = [5, 11], [5, 8]
    keys = [torch.randn(n, HEADS, DIM, generator=generator) for n in lengths]
    values = [torch.randn(n, HEADS, DIM, generator=generator) for n in lengths]
    q = torch.randn(sum(queries), HEADS, DIM, generator=generator)
    k_pages, v_pages = torch.full((2, 6, PAGE, HEADS, DIM), float("nan"))
    table = torch.tensor([[1, 2, 0], [3, 4, 5]], dtype=torch.int32)
    for row, (k, v) in enumerate(zip(keys, values, strict=True)):
        for i in range(len(k)):
            k_pages[table[row, i // PAGE], i % PAGE], v_pages[table[row, i // PAGE], i % PAGE] = k[i], v[i]
    starts = torch.tensor([0, 5, 13], dtype=torch.int32)
    batch = PagedBatch(starts, torch.tensor(lengths, dtype=torch.int32), table, torch.zeros(13, dtype=torch.int64), 8, 11)
    facts = AttentionFacts("float32", "float32", HEADS, HEADS, DIM, DIM, PAGE, 0.3, window=window, causal=False)
    parts = ((0, 1, 4, 0), (1, 4, 7, 3), (1, 7, 9, 3))  # request, span in it, and its first query's position
    rows = [torch.arange(first, end) - before + 5 * row for row, first, end, before in parts]
    first, end = (torch.cat([torch.full((part[2] - part[1],), part[i]) for part in parts]) for i in (1, 2))
    spans = Spans(torch.cat(rows), first, end)
    own = span_batch(batch, spans, len(q))
    got = PagedAttentionReference(facts).run(q[spans.rows], k_pages, v_pages, own)
    wanted = []
    for (row, begin, stop, _), mine in zip(parts, rows, strict=True):
        at, key = torch.arange(begin, stop), torch.arange(lengths[row])
        mask = (key <= at[:, None]) | ((key >= begin) & (key < stop))
        if window is not None:
            mask &= at[:, None] - key < window
        heads = (x.transpose(0, 1) for x in (q[mine], keys[row], values[row]))
        wanted.append(torch.nn.functional.scaled_dot_product_attention(*heads, attn_mask=mask, scale=0.3).transpose(0, 1))
    torch.testing.assert_close(got, torch.cat(wanted))
