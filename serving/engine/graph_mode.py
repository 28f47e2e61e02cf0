"""How steps are made replayable: whole, in pieces around attention, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from pagoda.hal.errors import ConfigError
from pagoda.hal.graphs import GraphPolicy, Graphs, Pieces
from pagoda.hal.kernel import KernelRun
from pagoda.hal.table import Choice

GraphMode = Literal["full", "piecewise", "none"]
"""What `--graphs` takes."""

Wrap = Callable[[Choice, KernelRun], KernelRun]

APART = frozenset({"paged_attention"})
"""Primitives that stay outside the pieces, beside those whose kernel cannot be captured."""


def policy_of(mode: GraphMode, graphs: Graphs, device: str) -> GraphPolicy:
    """The device's policy under `mode`. Raises `ConfigError` where the device cannot do it so."""
    policy = graphs.policy
    if mode == "none" and (policy.static_shapes or policy.mode == "traced"):
        raise ConfigError(f"--graphs none: {device} runs steps of fixed sizes alone, so none runs as it is; leave it out")
    if mode == "piecewise" and policy.mode != "eager" and not isinstance(graphs, Pieces):
        raise ConfigError(f"--graphs piecewise: {device} makes whole steps replayable, not pieces of them; take full or none")
    return GraphPolicy() if mode == "none" else policy


def apart(graphs: Graphs, inner: Wrap | None) -> Wrap:
    """For `KernelTable(wrap=…)`: kernels that stay outside the pieces of a captured step; `inner` is put around all of them first."""

    def wrap(choice: Choice, run: KernelRun) -> KernelRun:
        run = inner(choice, run) if inner is not None else run
        whole = choice.op not in APART and "capturable" in choice.chosen.claims
        return run if whole or not isinstance(graphs, Pieces) else _Apart(run, graphs)

    return wrap


class _Apart:
    """A kernel that is run between the pieces."""

    def __init__(self, run: KernelRun, graphs: Pieces) -> None:
        self._inner, self._graphs = run, graphs
        self.pack, self.plan = run.pack, run.plan

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        return self._graphs.cut(lambda: self._inner.run(*args, **kwargs))
