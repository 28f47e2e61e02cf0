"""Engines that follow grammars: what a server and the SDK start where a library for them is installed.

The text side is imported when the first grammar is asked for: a start in the engine's process leads through this module.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from importlib.util import find_spec
from threading import Lock

from pagoda.serving.engine.config import EngineConfig
from pagoda.serving.engine.core import Sink
from pagoda.serving.engine.grammar import Compiler, Grammar
from pagoda.serving.engine.inprocess_client import Engine, EngineStarter
from pagoda.serving.engine.starter import deferred_starter
from pagoda.serving.engine.structured import StructuredOutputsParams

PACKAGES = {"xgrammar": "xgrammar", "guidance": "llguidance"}
"""What each backend needs."""


def installed() -> bool:
    """Whether structured outputs can be served here."""
    return any(find_spec(package) is not None for package in PACKAGES.values())


def structured_starter(config: EngineConfig) -> EngineStarter:
    """`deferred_starter`, with grammars where they are installed and the engine has a tokenizer."""
    if config.skip_tokenizer_init or not installed():
        return deferred_starter(config)
    return partial(_start, config)


def _start(config: EngineConfig, sink: Sink) -> Engine:
    engine = deferred_starter(config)(sink)
    engine.core.follow_grammars(_Maker(config, engine.core.facts.vocab_size))
    return engine


class _Maker:
    """A `GrammarMaker` of the configuration, made when it is needed."""

    def __init__(self, config: EngineConfig, vocab: int) -> None:
        self._config, self._vocab = config, vocab
        self._lock = Lock()
        self._made: Compiler | None = None

    def __call__(self, asked: StructuredOutputsParams) -> Grammar:
        with self._lock:
            if self._made is None:
                self._made = import_module("pagoda.serving.frontend.structured.maker").maker_of(self._config, self._vocab)
        return self._made(asked)
