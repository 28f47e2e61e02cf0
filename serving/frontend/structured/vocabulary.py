"""What the grammar libraries are told of a tokenizer: the bytes of each token, which ones are marks, which ones end."""

from __future__ import annotations

from typing import NamedTuple

from pagoda.serving.frontend.text import Tokenizer

NO_TEXT = b"\xff"
"""Before a special token's name: no text has this byte, so that only a grammar that names the token takes it."""


class Vocabulary(NamedTuple):
    """Of the served model: `texts` has an entry for each row of its logits."""

    tokenizer: Tokenizer
    texts: list[bytes]
    special: list[int]
    stops: list[int]


def vocabulary_of(tokenizer: Tokenizer, rows: int) -> Vocabulary:
    """Models have more rows than their tokenizers have words: the rest is no text."""
    known = min(rows, tokenizer.vocab_size)
    special = sorted({token for token in tokenizer.special_ids if token < known} | {token for token in tokenizer.eos_ids if token < known})
    texts = [tokenizer.token_bytes(token) for token in range(known)] + [b""] * (rows - known)
    for token in special:
        texts[token] = NO_TEXT + texts[token]
    return Vocabulary(tokenizer, texts, special, [token for token in tokenizer.eos_ids if token < known])
