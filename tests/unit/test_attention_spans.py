"""Tokens of an image see each other in both directions: `run_spans` of the attention reference against a mask written out."""

from __future__ import annotations

import pytest
import torch
from pagoda.ops.attention import AttentionFacts, PagedAttentionReference, PagedBatch, Spans

PAGE, HEADS, DIM = 4, 2, 8


@pytest.mark.parametrize("window", [None, 3])
def test_tokens_of_a_span_see_it_whole_and_what_they_saw_before(window: int | None) -> None:
    """Two requests, the second of which has a prefix of three tokens in pages already; its span lies in this step."""
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
    facts = AttentionFacts("float32", "float32", HEADS, HEADS, DIM, DIM, PAGE, 0.3, window=window)
    at = torch.arange(4, 9)  # positions of the span in the second request, whose first query is its fourth token
    spans = Spans(5 + at - 3, torch.full((5,), 4), torch.full((5,), 9))
    got = PagedAttentionReference(facts).run_spans(q, k_pages, v_pages, batch, spans)
    key = torch.arange(11)
    mask = (key <= at[:, None]) | ((key >= 4) & (key < 9))
    if window is not None:
        mask &= at[:, None] - key < window
    want = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1) for x in (q[spans.rows], keys[1], values[1])), attn_mask=mask, scale=0.3
    ).transpose(0, 1)
    torch.testing.assert_close(got, want)
