"""Grammars of structured outputs, compiled by xgrammar for the served vocabulary; loads in the engine's process, when first asked for."""

from __future__ import annotations

import re
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from threading import Lock
from typing import Any

from pagoda.hal.errors import RequestError
from pagoda.serving.engine.config import EngineConfig
from pagoda.serving.engine.core import Sink
from pagoda.serving.engine.grammar import Grammar
from pagoda.serving.engine.inprocess_client import Engine, EngineStarter
from pagoda.serving.engine.plan import IntArray
from pagoda.serving.engine.starter import deferred_starter
from pagoda.serving.frontend.load import load_tokenizer, tokenizer_path
from pagoda.serving.frontend.text import Tokenizer

_LOG_HEAD = re.compile(r"^\[\S*\] \S+:\d+: ")

_CONTROLS = frozenset(range(32)) - frozenset(b"\n\r")


def installed() -> bool:
    """Whether structured outputs can be served here."""
    return find_spec("xgrammar") is not None


def structured_starter(config: EngineConfig) -> EngineStarter:
    """`deferred_starter`, with grammars where they are installed and the engine has a tokenizer."""
    if config.skip_tokenizer_init or not installed():
        return deferred_starter(config)
    return partial(_start, config)


def _start(config: EngineConfig, sink: Sink) -> Engine:
    engine = deferred_starter(config)(sink)
    engine.core.follow_grammars(GrammarMaker(config, engine.core.facts.vocab_size))
    return engine


MAX_BLANKS = 20
"""Blanks between two parts of a JSON answer: enough to indent by, too few for a model to wander off in."""


class GrammarMaker:
    """Implements `grammar.Compiler`."""

    def __init__(self, config: EngineConfig, vocab: int) -> None:
        self._config, self._vocab = config, vocab
        self._lock = Lock()
        self._compiler: Any = None

    def __call__(self, structured: tuple[str, Any]) -> Grammar:
        kind, source = structured
        with self._lock:
            if self._compiler is None:
                self._compiler = compiler_of(load_tokenizer(tokenizer_path(self._config)), self._vocab)
        try:
            if kind == "json_object":
                compiled = self._compiler.compile_builtin_json_grammar()
            else:
                compiled = self._compiler.compile_json_schema(source, max_whitespace_cnt=MAX_BLANKS)
        except Exception as error:  # the library raises its own and bare ones for schemas that it does not take
            raise RequestError(
                f"the JSON schema cannot be followed: {_LOG_HEAD.sub('', str(error)).strip()}", param="response_format"
            ) from error
        return partial(XMatcher, compiled)


def compiler_of(tokenizer: Tokenizer, vocab: int) -> Any:
    """xgrammar's compiler for a vocabulary, in which special tokens are no text, and control characters are not used."""
    xgrammar = import_module("xgrammar")
    special, known = tokenizer.special_ids, min(vocab, tokenizer.vocab_size)
    texts = [b"" if i >= known or i in special else tokenizer.token_bytes(i) for i in range(vocab)]
    # JSON escapes these in strings, where the library lets them pass when a length is limited; elsewhere they are spare
    texts = [b"" if _CONTROLS.intersection(text) else text for text in texts]
    info = xgrammar.TokenizerInfo(texts, xgrammar.VocabType.RAW, vocab_size=vocab, stop_token_ids=list(tokenizer.eos_ids))
    return xgrammar.GrammarCompiler(info, max_threads=1)


class XMatcher:
    """Implements `grammar.Matcher`."""

    def __init__(self, compiled: Any) -> None:
        self._matcher = import_module("xgrammar").GrammarMatcher(compiled)
        self._stops = [int(i) for i in self._matcher.stop_token_ids]
        self._guessed: list[bool] = []

    def accept(self, tokens: list[int]) -> None:
        for token in tokens:
            if not self._matcher.is_terminated():
                self._matcher.accept_token(token)

    def advance(self, token: int) -> bool:
        ended = self._matcher.is_terminated()
        allowed = token in self._stops if ended else self._matcher.accept_token(token)
        if allowed:
            self._guessed.append(not ended)
        return bool(allowed)

    def go_back(self) -> None:
        if self._guessed.pop():
            self._matcher.rollback(1)

    def fill(self, row: IntArray) -> None:
        if not self._matcher.is_terminated():
            self._matcher.fill_next_token_bitmask(row.reshape(1, -1))
            return
        for token in self._stops:
            row.view("uint32")[token // 32] |= 1 << token % 32
