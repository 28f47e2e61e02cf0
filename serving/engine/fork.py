"""Forking: a sequence that goes on from where another one is, sharing its pages."""

from __future__ import annotations

import numpy as np
from pagoda.hal.errors import RequestError
from pagoda.serving.engine.ledger import Ledger
from pagoda.serving.engine.plan import IntArray
from pagoda.serving.engine.sequence import NO_SLOT, Sequence


def known_tokens(ledger: Ledger, sequence: Sequence) -> IntArray:
    """Prompt and output as far as the host knows them."""
    if sequence.slot == NO_SLOT:
        return sequence.tokens
    return ledger.slots.tokens[sequence.slot, : ledger.slots.known[sequence.slot]].copy()


def fork_sequence(ledger: Ledger, parent: Sequence, token: int | None, at: int | None = None) -> Sequence:
    """Queue a child with the parent's known tokens, of its output the first `at` where given, and `token`."""
    request, tokens = parent.request, known_tokens(ledger, parent)
    prompt = len(request.source.prompt)
    if at is not None:
        if not 0 <= at <= len(tokens) - prompt:
            raise RequestError(f"at={at}: sequence {parent.index} has {len(tokens) - prompt} output tokens so far", param="at")
        tokens = tokens[: prompt + at]
    digests = parent.digests[: len(tokens) // ledger.index.unit]
    if token is not None:
        tokens = np.append(tokens, np.int32(token))
    if len(tokens) >= parent.limit:
        raise RequestError(f"sequence {parent.index} has {len(tokens)} tokens of at most {parent.limit}: no room for a fork")
    epoch = ledger.epoch(len(tokens))
    child = Sequence(request, request.born, tokens, parent.limit, digests=digests if epoch == parent.epoch else [], epoch=epoch)
    request.born += 1
    request.sequences.append(child)
    request.unfinished += 1
    for sequence in request.sequences:
        if sequence.slot != NO_SLOT:
            ledger.slots.plain[sequence.slot] = False
    ledger.waiting.push(child)
    return child
