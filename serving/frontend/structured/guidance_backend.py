"""Grammars of llguidance. It bounds its own work, so that compiling needs no process: a thread that it gives Python's lock back in."""

from __future__ import annotations

import json
import re
from functools import partial
from importlib import import_module
from typing import Any

from pagoda.hal.errors import RequestError
from pagoda.serving.engine.grammar import Grammar
from pagoda.serving.engine.plan import IntArray
from pagoda.serving.frontend.structured.schema import Schema
from pagoda.serving.frontend.structured.vocabulary import NO_TEXT, Vocabulary
from pagoda.serving.frontend.structured.xgrammar_backend import AHEAD, MAX_BLANKS, allow

_UNKNOWN = re.compile(r"Unimplemented keys: \[([^\]]*)\]")


LIMITS = {"max_items_in_row": 6_000, "step_max_items": 200_000}
"""What the library's parser may hold at one place, and make in a step of up to 10 ms. By its own limit, a third of the first, it gives up
within objects of more than 500 optional properties, each of which is four such items; 3,000 of them take half a second a mask."""


class _Words:
    """What `LLTokenizer` asks of a tokenizer."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        special = set(vocabulary.special)
        self.tokens = [text.removeprefix(NO_TEXT) if i in special else text for i, text in enumerate(vocabulary.texts)]
        self.special_token_ids = vocabulary.special
        self.eos_token_id = vocabulary.stops[0] if vocabulary.stops else 0
        self.bos_token_id = None
        self._tokenizer = vocabulary.tokenizer

    def __call__(self, text: bytes | str) -> list[int]:
        return self._tokenizer.encode(text.decode("utf-8", "replace") if isinstance(text, bytes) else text, add_special_tokens=False)


class Guidance:
    """Compiles for one vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._library = import_module("llguidance")
        wrapper = self._library.TokenizerWrapper(_Words(vocabulary))
        self._tokenizer = self._library.LLTokenizer(wrapper, n_vocab=len(vocabulary.texts), eos_token=vocabulary.stops or None)
        self._stops = vocabulary.stops
        self._limits = self._library.LLParserLimits(**LIMITS)

    def compile(self, kind: str, source: str, origin: str) -> Grammar:
        """From `json` (a schema with `options` in it), `regex`, or `lark`. Raises `RequestError` naming what is not followed."""
        make = {
            "json": self._library.LLMatcher.grammar_from_json_schema,
            "regex": self._library.LLMatcher.grammar_from_regex,
            "lark": self._library.LLMatcher.grammar_from_lark,
        }[kind]
        try:
            begun = self._library.LLMatcher(self._tokenizer, make(source), log_level=0, limits=self._limits)
        except ValueError as error:
            raise refused(str(error), origin) from error
        if begun.is_error():
            raise refused(begun.get_error(), origin)
        return partial(GuidanceMatcher, begun, self._stops)

    def as_lark(self, grammar: str, origin: str) -> str:
        """EBNF (GBNF) as Lark; Lark as it is. Raises `RequestError` for neither."""
        try:
            return str(import_module("llguidance.gbnf_to_lark").any_to_lark(grammar))
        except Exception as error:  # its parser raises bare ones
            raise refused(str(error), origin) from error


def refused(why: str, origin: str) -> RequestError:
    """An error that names the feature."""
    unknown = _UNKNOWN.search(why)
    if unknown:
        return RequestError(f"the JSON schema cannot be followed: no grammar can keep to {unknown[1]}; leave it out", param=origin)
    first = next((line for line in why.splitlines() if line.strip()), why)
    return RequestError(f"it cannot be followed: {first.strip()[:400]}", param=origin)


def with_options(schema: Schema, blanks: bool, pattern: str | None) -> dict[str, Any]:
    """The schema with llguidance's options in it."""
    given = schema if isinstance(schema, dict) else {} if schema else {"not": {}}
    options: dict[str, Any] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    if blanks:
        options = {"whitespace_pattern": pattern or rf"[ \n\r\t]{{0,{MAX_BLANKS}}}"}
    return {**given, "x-guidance": options}


def choice_lark(texts: tuple[str, ...]) -> str:
    return "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)


class GuidanceMatcher:
    """Implements `grammar.Matcher`. Where the library gives up (`LIMITS`), the output ends."""

    def __init__(self, begun: Any, stops: list[int]) -> None:
        self._matcher, self._stops = begun.deep_copy(), stops
        self._ended = False
        self._forced: tuple[list[int], int] | None = None
        """Tokens that must come, from a place among them on; None where they are not known yet. Asked for once, as they may be many."""
        self._guessed: list[tuple[bool, tuple[list[int], int] | None]] = []

    def accept(self, tokens: list[int]) -> None:
        for token in tokens:
            if self._ended or token in self._stops or self._matcher.is_stopped():
                self._ended = True
                return
            self._matcher.consume_token(token)
            self._move(token)

    def advance(self, token: int) -> bool:
        stopped = self._ended or self._matcher.is_stopped()
        if token in self._stops:
            allowed = stopped or self._matcher.is_accepting()
        else:
            allowed = not stopped and self._matcher.validate_tokens([token]) == 1 and self._matcher.consume_token(token)
        if allowed:
            self._guessed.append((token not in self._stops, self._forced))
            self._move(token)
        return bool(allowed)

    def _move(self, token: int) -> None:
        if self._forced is not None:
            tokens, place = self._forced
            follows = place + 1 < len(tokens) and tokens[place] == token
            self._forced = (tokens, place + 1) if follows else None

    def go_back(self) -> None:
        moved, self._forced = self._guessed.pop()
        if moved:
            self._matcher.rollback(1)

    def forced(self) -> list[int]:
        if self._ended or self._matcher.is_stopped():
            return []
        if self._forced is None:
            self._forced = list(self._matcher.compute_ff_tokens()), 0
        tokens, place = self._forced
        return tokens[place : place + AHEAD]

    def fill(self, row: IntArray) -> None:
        if not self._ended and not self._matcher.is_stopped():
            self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
            if not self._matcher.is_error():
                return
            row[:] = 0
        allow(row, self._stops)

    def idle(self) -> bool:
        return False

    def failure(self) -> str | None:
        if not self._matcher.is_error():
            return None
        return f"the grammar took more work than is allowed: {self._matcher.get_error().partition(chr(10))[0][:200]}"
