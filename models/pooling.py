"""What a model answers with instead of tokens, as data: which hidden states count, and what is made of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PoolKind = Literal["cls", "last", "mean", "all"]


@dataclass(frozen=True)
class Dense:
    """A projection to `outputs` numbers, then `activation` where there is one."""

    outputs: int
    activation: str | None = None
    bias: bool = True


@dataclass(frozen=True)
class PoolNorm:
    """A layer norm between projections."""

    eps: float
    bias: bool = False


PoolStep = Dense | PoolNorm


@dataclass(frozen=True)
class Pooler:
    """From the last hidden states of a prompt to its answer.

    Attributes:
        task: "embed" gives vectors that are compared, "classify" a score for each label.
        kind: the first token's state, the last one's, the mean of all, or each token's.
        steps: what the chosen states go through, in order.
        normalize: vectors have length 1, unless a request asks for raw ones.
        activation: what scores go through, unless a request asks for raw ones.
        labels: names of the scores; empty where they have none.
        step_tag: only tokens with this id count (process rewards); None: all. returned: scores that are kept; empty: all.
    """

    task: Literal["embed", "classify"]
    kind: PoolKind
    steps: tuple[PoolStep, ...] = ()
    normalize: bool = False
    activation: Literal["softmax", "sigmoid", "none"] = "none"
    labels: tuple[str, ...] = ()
    step_tag: int | None = None
    returned: tuple[int, ...] = ()

    @property
    def tasks(self) -> tuple[str, ...]:
        """What requests may ask for, the usual one first."""
        each = f"token_{self.task}"
        return (each,) if self.kind == "all" else (self.task, each)

    def outputs(self, width: int) -> int:
        """Numbers of one answer, of a model so wide."""
        return next((step.outputs for step in reversed(self.steps) if isinstance(step, Dense)), width)
