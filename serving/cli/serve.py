"""`pagoda serve`: a model over HTTP. The engine is a process of its own; this one speaks the protocols and makes text."""

from __future__ import annotations

import time
from collections.abc import Sequence
from importlib import import_module

from pagoda.serving.engine.child import engine_child

HELP = ("-h", "--help")


def run(argv: Sequence[str]) -> int:
    started = time.monotonic()
    if any(word in HELP for word in argv):
        import_module("pagoda.serving.cli.serve_run").options().values(argv)
    child = engine_child()  # torch is the longest import of a start: reading the command line and the server's own run beside it
    try:
        return int(import_module("pagoda.serving.cli.serve_run").run(argv, started, child))
    finally:
        child.kill()
