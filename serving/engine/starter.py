"""A starter whose code loads where it runs: a server hands it to its engine's process and needs no torch itself."""

from __future__ import annotations

from functools import partial
from importlib import import_module

from pagoda.serving.engine.config import EngineConfig
from pagoda.serving.engine.core import Sink
from pagoda.serving.engine.inprocess_client import Engine, EngineStarter


def deferred_starter(config: EngineConfig) -> EngineStarter:
    """The same as `build.engine_starter(config)`, by name."""
    return partial(_start, config)


def _start(config: EngineConfig, sink: Sink) -> Engine:
    engine: Engine = import_module("pagoda.serving.engine.build").start_engine(config, sink)
    return engine
