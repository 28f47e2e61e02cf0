"""Engines that follow grammars: what a server and the SDK start where a library for them is installed."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec

from pagoda.serving.engine.config import EngineConfig
from pagoda.serving.engine.core import Sink
from pagoda.serving.engine.inprocess_client import Engine, EngineStarter
from pagoda.serving.engine.starter import deferred_starter
from pagoda.serving.frontend.load import load_tokenizer, tokenizer_path
from pagoda.serving.frontend.structured.maker import GrammarMaker

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
    engine.core.follow_grammars(maker_of(config, engine.core.facts.vocab_size))
    return engine


def maker_of(config: EngineConfig, vocab: int) -> GrammarMaker:
    """Of an engine's configuration; the tokenizer is read when the first grammar is asked for."""
    return GrammarMaker(config.structured, lambda: load_tokenizer(tokenizer_path(config)), vocab)
