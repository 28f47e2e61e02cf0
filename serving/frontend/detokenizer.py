"""How tokens become text one at a time: a decoder of `tokenizers`, taken apart so that each new token costs the same."""

from __future__ import annotations

import codecs
import contextlib
import json
import re
from collections.abc import Sequence
from typing import Any, Protocol

import tokenizers
from pagoda.serving.frontend.text import Detokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"


class Pieces(Protocol):
    """A vocabulary's decoding rule."""

    def stream(self, skip_special_tokens: bool, context: Sequence[int] = ()) -> Detokenizer:
        """A stream that continues the text of `context` (a prompt), whose own text is not given again."""
        ...

    def bytes_of(self, token_id: int) -> bytes:
        """What the token adds to the text; b"" outside the vocabulary."""
        ...


def pieces_of(core: tokenizers.Tokenizer, special_ids: frozenset[int]) -> Pieces:
    """The rule of `core`'s decoder: exact and constant-time for byte-level and sentencepiece shapes, by windows for others."""
    # the decoder alone: the whole tokenizer as JSON has megabytes
    steps = _steps(None if core.decoder is None else json.loads(core.decoder.__getstate__()))
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return BytePieces(core, special_ids)
    if kinds in (["Replace", "ByteFallback", "Fuse"], ["Replace", "ByteFallback", "Fuse", "Strip"]) and _is_space_rule(steps):
        return SpacePieces(core, special_ids, strip=len(kinds) == 4, fallback=True)
    if kinds == ["Metaspace"] and steps[0]["replacement"] == _SPACE and steps[0].get("prepend_scheme") == "never":
        return SpacePieces(core, special_ids, strip=False, fallback=False)
    return WindowPieces(core, special_ids)


def _steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return [{"type": "none"}]
    return decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]


def _is_space_rule(steps: list[dict[str, Any]]) -> bool:
    replace, strip = steps[0], steps[3:]
    spaces = replace["pattern"] == {"String": _SPACE} and replace["content"] == " "
    return spaces and all((s["content"], s["start"], s["stop"]) == (" ", 1, 0) for s in strip)


def _byte_alphabet() -> dict[str, int]:
    """Byte-level vocabularies spell printable Latin-1 bytes as themselves and the other 68 as U+0100 onwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_ALPHABET = _byte_alphabet()


class BytePieces:
    """Byte-level BPE: every token is a run of bytes; the text is their UTF-8."""

    def __init__(self, core: tokenizers.Tokenizer, special_ids: frozenset[int]) -> None:
        self._core = core
        self._special_ids = special_ids
        self._bytes: dict[int, bytes] = {}
        self.texts: dict[int, str] = {}
        """Of tokens whose bytes are whole characters, as far as they were met."""

    def bytes_of(self, token_id: int) -> bytes:
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._spell(token_id)
            with contextlib.suppress(UnicodeDecodeError):
                self.texts[token_id] = found.decode()
        return found

    def _spell(self, token_id: int) -> bytes:
        token = self._core.id_to_token(token_id) or ""
        codes = [_ALPHABET.get(char) for char in token]
        return token.encode() if None in codes else bytes(codes)  # type: ignore[arg-type]

    def stream(self, skip_special_tokens: bool, context: Sequence[int] = ()) -> Detokenizer:
        stream = _ByteStream(self, self._special_ids if skip_special_tokens else frozenset())
        stream.push(context[-4:])  # only bytes of one unfinished character matter
        return stream


class _ByteStream:
    __slots__ = ("_pieces", "_skipped", "_texts", "_utf8", "_whole")

    def __init__(self, pieces: BytePieces, skipped: frozenset[int]) -> None:
        self._pieces = pieces
        self._texts = pieces.texts
        self._skipped = skipped
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._whole = True  # the last character is

    def push(self, token_ids: Sequence[int]) -> str:
        if len(token_ids) == 1:
            return self._text(token_ids[0])
        return "".join(map(self._text, token_ids))

    def _text(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        if self._whole and (text := self._texts.get(token_id)) is not None:
            return text
        text = self._utf8.decode(self._pieces.bytes_of(token_id))
        self._whole = not self._utf8.getstate()[0]
        return text

    def flush(self) -> str:
        self._whole = True
        return self._utf8.decode(b"", final=True)


class SpacePieces:
    """Sentencepiece vocabularies: "▁" is a space, "<0xE4>" a byte, and the text may lose the space it begins with."""

    def __init__(self, core: tokenizers.Tokenizer, special_ids: frozenset[int], strip: bool, fallback: bool) -> None:
        self._core = core
        self._special_ids = special_ids
        self.strip = strip
        self._fallback = fallback
        self._pieces: dict[int, str | int] = {}

    def piece(self, token_id: int) -> str | int:
        """The token's text, or its byte value."""
        found = self._pieces.get(token_id)
        if found is None:
            found = self._pieces[token_id] = self._spell(token_id)
        return found

    def _spell(self, token_id: int) -> str | int:
        token = self._core.id_to_token(token_id) or ""
        byte = _BYTE_TOKEN.fullmatch(token) if self._fallback else None
        return int(byte[1], 16) if byte else token.replace(_SPACE, " ")

    def bytes_of(self, token_id: int) -> bytes:
        piece = self.piece(token_id)
        return bytes([piece]) if isinstance(piece, int) else piece.encode()

    def stream(self, skip_special_tokens: bool, context: Sequence[int] = ()) -> Detokenizer:
        stream = _SpaceStream(self, self._special_ids if skip_special_tokens else frozenset())
        stream.begun |= any(self.bytes_of(i) and not (skip_special_tokens and i in self._special_ids) for i in context)
        stream.push(context[-4:])
        return stream


class _SpaceStream:
    def __init__(self, pieces: SpacePieces, skipped: frozenset[int]) -> None:
        self._pieces = pieces
        self._skipped = skipped
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self.begun = not pieces.strip

    def push(self, token_ids: Sequence[int]) -> str:
        return "".join(map(self._text, token_ids))

    def _text(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        piece = self._pieces.piece(token_id)
        if isinstance(piece, int):
            return self._first(self._utf8.decode(bytes([piece])))
        return self._first(self.flush() + piece)

    def flush(self) -> str:
        rest = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return rest

    def _first(self, text: str) -> str:
        if self.begun or not text:
            return text
        self.begun = True
        return text.removeprefix(" ")


class WindowPieces:
    """Any other decoder: the library decodes a short window with and without the newest token."""

    def __init__(self, core: tokenizers.Tokenizer, special_ids: frozenset[int]) -> None:
        self._core = core
        self._special_ids = special_ids

    def bytes_of(self, token_id: int) -> bytes:
        return str(self._core.decode([token_id], skip_special_tokens=False)).encode()

    def stream(self, skip_special_tokens: bool, context: Sequence[int] = ()) -> Detokenizer:
        skipped = self._special_ids if skip_special_tokens else frozenset()
        stream = _WindowStream(self._core, skipped)
        stream.push(context[-_WINDOW:])
        return stream


_WINDOW = 8
"""Tokens of context that a decoder may look back on; also how long an unfinished character may keep text waiting."""


class _WindowStream:
    def __init__(self, core: tokenizers.Tokenizer, skipped: frozenset[int]) -> None:
        self._core = core
        self._skipped = skipped
        self._ids: list[int] = []
        self._given = 0  # of `_ids`, those whose text is out

    def push(self, token_ids: Sequence[int]) -> str:
        return "".join(map(self._text, token_ids))

    def _text(self, token_id: int) -> str:
        if token_id in self._skipped or self._core.id_to_token(token_id) is None:
            return ""
        self._ids.append(token_id)
        waiting = len(self._ids) - self._given
        fresh = self._fresh()
        if fresh.endswith("\ufffd") and waiting < _WINDOW:
            return ""
        self._ids = self._ids[-_WINDOW:]
        self._given = len(self._ids)
        return fresh

    def flush(self) -> str:
        rest = self._fresh()
        self._given = len(self._ids)
        return rest

    def _fresh(self) -> str:
        before = self._core.decode(self._ids[: self._given], skip_special_tokens=False)
        return self._core.decode(self._ids, skip_special_tokens=False)[len(before) :]
