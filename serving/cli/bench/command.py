"""`pagoda bench KIND`: finds the measurement."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

from pagoda.hal.errors import ConfigError
from pagoda.serving.cli import help_text

KINDS = {
    "latency": "Time of one batch through the engine, alone.",
    "throughput": "Tokens a second with everything queued at once.",
    "prefill": "Tokens of prompts read a second, at several lengths.",
    "prefix": "Time to the first token with and without a cached beginning.",
    "sweep": "Time of a decode step at several batch sizes.",
    "serve": "A running server under load: rates, concurrency, time to first token, goodput.",
    "perplexity": "How well a model foretells a text, in sliding windows.",
    "startup": "Time from process start to ready, and to the first token.",
    "compare": "Two results beside each other, with a plot.",
    "compare-peers": "Other engines and Pagoda on the same checkpoint, by turns.",
}


def run(argv: Sequence[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print("\n".join([help_text.bold("pagoda bench KIND [options]"), "", *help_text.rows(list(KINDS.items()), 16)]))
        return 0
    kind, *rest = argv
    if kind not in KINDS:
        raise ConfigError(f"no benchmark {kind!r}; there are {', '.join(KINDS)}")
    return int(import_module(f"pagoda.serving.cli.bench.{kind.replace('-', '_')}").run(rest) or 0)
