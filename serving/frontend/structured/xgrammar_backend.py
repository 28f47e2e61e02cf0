"""Grammars of xgrammar: compiled in a process of their own (`compile_child.py`), followed here."""

from __future__ import annotations

import json
import re
from collections import Counter
from functools import lru_cache, partial
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
from pagoda.hal import heap
from pagoda.serving.engine.grammar import Grammar
from pagoda.serving.engine.plan import IntArray
from pagoda.serving.frontend.structured.vocabulary import Vocabulary

MAX_BLANKS = 20
"""Blanks between two parts of a JSON answer: enough to indent by, too few for a model to wander off in."""

_EXPRESSION = re.compile(r'^(\w+ ::= Regex\(".*"), json_string=true\)$', re.MULTILINE)
"""A rule of a schema's `pattern`. xgrammar keeps it to characters that need no escape; those of `with_lengths` have escapes in them."""


def token_info(texts: list[bytes], stops: list[int]) -> Any:
    """xgrammar's view of a `Vocabulary`."""
    xgrammar = import_module("xgrammar")
    return xgrammar.TokenizerInfo(texts, xgrammar.VocabType.RAW, vocab_size=len(texts), stop_token_ids=stops)


def compile_source(compiler: Any, kind: str, source: str, blanks: bool) -> str:
    """The compiled grammar, serialized. `blanks`: JSON may have more than `json.dumps` writes."""
    if kind == "json":
        options = {"any_whitespace": True, "max_whitespace_cnt": MAX_BLANKS} if blanks else {"any_whitespace": False}
        grammars = import_module("xgrammar").Grammar
        rules = str(grammars.from_json_schema(source, strict_mode=False, **options))
        written = _EXPRESSION.sub(r"\1)", rules)
        made = compiler.compile_json_schema(source, strict_mode=False, **options) if written == rules else None
        compiled = made or compiler.compile_grammar(grammars.from_ebnf(written))
    elif kind == "structural_tag":
        compiled = compiler.compile_structural_tag(source)
    else:
        compiled = {"regex": compiler.compile_regex, "grammar": compiler.compile_grammar}[kind](source)
    return str(compiled.serialize_json())


LARGE = 16 << 20
"""Bytes of a serialized grammar to read which takes ten times as much for a moment; the heap would keep it."""


class Compiled(NamedTuple):
    """A grammar, and the memory that it holds."""

    grammar: Grammar
    nbytes: int


def load(serialized: str, info: Any, writing: Writing) -> Compiled:
    """A grammar from what `compile_source` gave."""
    compiled = import_module("xgrammar").CompiledGrammar.deserialize_json(serialized, info)
    if len(serialized) > LARGE:
        heap.trim()
    return Compiled(partial(XMatcher, compiled, writing), int(compiled.memory_size_bytes))


AHEAD = 512
"""Characters, or tokens, of what must come next that are looked at: a grammar may leave no choice in a million."""
CUT = 16
"""Tokens at the end of so long a text that are left for later."""
FEW = 64
"""Words of a mask that are not 0 where only beginnings of one text may come."""


class Writing:
    """How the model's tokenizer writes a text after a token."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._texts, self._tokenizer = vocabulary.texts, vocabulary.tokenizer
        self._special = set(vocabulary.special)
        self._known = lru_cache(4096)(self._write)
        self._words = Counter(vocabulary.texts)
        self._longest = max(map(len, vocabulary.texts), default=0)
        self.beginnings = lru_cache(4096)(self._beginnings)

    def __call__(self, text: str, last: int | None) -> tuple[int, ...]:
        """Its tokens; none where the two together would be cut elsewhere, so that the text does not begin with a token of its own."""
        return self._known(text, None if last in self._special else last) if text else ()

    def _write(self, text: str, last: int | None) -> tuple[int, ...]:
        before = self._texts[last].decode("utf-8", "replace") if last is not None else ""
        tokens = self._tokenizer.encode(before + text, add_special_tokens=False)
        if last is None:
            return tuple(tokens)
        return tuple(tokens[1:]) if tokens[:1] == [last] else ()

    def _beginnings(self, text: str) -> int:
        """Of how many tokens each alone writes the beginning of this text."""
        written = text.encode()[: self._longest]
        return sum(self._words[written[:end]] for end in range(1, len(written) + 1))

    def after(self, text: str, place: int, token: int) -> int | None:
        """Where the text goes on after a token that writes it from `place`; None where it writes something else, or part of a character."""
        try:
            written = self._texts[token].decode()
        except UnicodeDecodeError:
            return None
        return place + len(written) if written and text.startswith(written, place) else None


def choice_grammar(texts: tuple[str, ...]) -> str:
    """In EBNF."""
    return "root ::= " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)


class XMatcher:
    """Implements `grammar.Matcher`. Where all that may come begins one text, masks have the token alone with which the tokenizer begins it:
    other tokens would write the same, as no text that the model learnt from has it."""

    def __init__(self, compiled: Any, writing: Writing) -> None:
        self._writing = writing
        self._last: int | None = None
        self._matcher = import_module("xgrammar").GrammarMatcher(compiled)
        self._stops = [int(i) for i in self._matcher.stop_token_ids]
        self._forced: tuple[str, int] | None = None
        """What must come, from a place in it on; None where that is not known yet. Asked for once, as the answer may be long."""
        self._guessed: list[tuple[bool, int | None, tuple[str, int] | None]] = []

    def accept(self, tokens: list[int]) -> None:
        for token in tokens:
            if not self._matcher.is_terminated():
                self._matcher.accept_token(token)
                self._move(token)

    def advance(self, token: int) -> bool:
        ended = self._matcher.is_terminated()
        allowed = token in self._stops if ended else self._matcher.accept_token(token)
        if allowed:
            self._guessed.append((not ended, self._last, self._forced))
            self._move(token)
        return bool(allowed)

    def _move(self, token: int) -> None:
        self._last = token
        if self._forced is not None:
            text, place = self._forced
            place = self._writing.after(text, place, token) or len(text)
            self._forced = (text, place) if place < len(text) else None

    def go_back(self) -> None:
        moved, self._last, self._forced = self._guessed.pop()
        if moved:
            self._matcher.rollback(1)

    def forced(self) -> list[int]:
        if self._matcher.is_terminated():
            return []
        tokens = self._writing(text := self._text(), self._last)
        # Where the text was cut the tokenizer may write it otherwise.
        return list(tokens if len(text) < AHEAD else tokens[:-CUT])

    def fill(self, row: IntArray) -> None:
        if self._matcher.is_terminated():
            return allow(row, self._stops)
        self._matcher.fill_next_token_bitmask(row.reshape(1, -1))
        if np.count_nonzero(row) <= FEW and (token := self._only(row)) is not None:
            row[:] = 0
            allow(row, [token])

    def idle(self) -> bool:
        return False

    def failure(self) -> str | None:
        return None

    def _only(self, row: IntArray) -> int | None:
        """The tokenizer's token where each that the mask allows writes the beginning of what must come."""
        text = self._text()
        tokens = self._writing(text, self._last)
        if not tokens:
            return None
        words = row.view(np.uint32)
        if not words[tokens[0] // 32] >> tokens[0] % 32 & 1:  # it writes texts otherwise where they begin
            return None
        allowed = sum(word.bit_count() for word in words[words != 0].tolist())
        return tokens[0] if allowed == self._writing.beginnings(text) else None

    def _text(self) -> str:
        """What must come next, or the beginning of it."""
        if self._forced is None:
            self._forced = self._found(), 0
        text, place = self._forced
        return text[place : place + AHEAD]

    def _found(self) -> str:
        try:
            return str(self._matcher.find_jump_forward_string())
        except UnicodeDecodeError:  # it begins or ends within a character
            return ""


def allow(row: IntArray, tokens: list[int]) -> None:
    """Set these tokens' bits."""
    for token in tokens:
        row.view("uint32")[token // 32] |= 1 << token % 32
