"""The text side of a model that is served without a tokenizer: token ids in, token ids out, no text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from pagoda.hal.errors import RequestError


class IdsOnly:
    """Implements `text.Tokenizer`: refuses texts, and makes none. Nothing ends an answer but its limit and stop ids."""

    vocab_size = 2**31
    eos_ids: tuple[int, ...] = ()
    special_ids: frozenset[int] = frozenset()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self._refuse()

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def encode_pair(self, first: str, second: str) -> tuple[list[int], int | None]:
        self._refuse()

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return ""

    def token_bytes(self, token_id: int) -> bytes:
        return b""

    def token_text(self, token_id: int) -> str:
        return ""

    def detokenizer(
        self, *, skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True, prompt: Sequence[int] = ()
    ) -> SilentDetokenizer:
        return SilentDetokenizer()

    def _refuse(self) -> NoReturn:
        raise RequestError("this model was started without its tokenizer (--skip-tokenizer-init): send token ids", param="prompt")


class SilentDetokenizer:
    """Implements `text.Detokenizer`; there is no text."""

    def push(self, token_ids: Sequence[int]) -> str:
        return ""

    def flush(self) -> str:
        return ""
