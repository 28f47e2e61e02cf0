"""How long steps take on these ranks, learnt from those before: when the next one is due, and what may share a step with whom."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from pagoda.serving.engine.plan import StepPlan

Floats = NDArray[np.float64]

MEMORY = 0.98
"""What an observation weighs after the next one: the last 50 or so count."""
EVERY = 8
"""Observations between two looks at all of them."""
OUTLIER = 4.0
"""No step counts for more than so many times what was expected, and a millisecond: some wait for what comes once."""
PROMPTS_MS, PASSES = 25.0, 10.0
"""A prompt is the last that a step takes in once its prompts take so long, and so many times what a step costs without any rows:
those behind it come sooner or as soon in a step of their own, and steps are not made for less."""
CHUNK_MS, CHUNK_PASSES = 150.0, 20.0
"""The same for the chunk of a prompt where others wait for the step's end; twice as much where others may only come."""
HOLD_MS = 150.0
"""Decodes stand back for prompts no longer than this at a time."""
HOLD_PASSES = 2.0
"""They do where their rows cost more than two further steps would: on devices that are limited by arithmetic, not where rows are
all but free."""


class Pace:
    """A step's time as so much for itself, for each decode and for each token of a prompt (least squares that forget).

    Until steps have been noted all is taken to cost nothing: nobody waits for anybody.
    """

    def __init__(self) -> None:
        self._moments: Floats = np.zeros((3, 3))
        self._sums: Floats = np.zeros(3)
        self._seen = 0
        self._each, self._decode, self._prompt = 0.0, 0.0, 0.0

    def note(self, plan: StepPlan, step_ms: float) -> None:
        """A step took so long; of a burst each of its steps."""
        row = _row(plan)
        if self._seen >= EVERY:
            step_ms = min(step_ms, OUTLIER * (self.expected_ms(plan) / plan.num_steps + 1.0))
        self._moments *= MEMORY
        self._sums *= MEMORY
        self._moments += np.outer(row, row)
        self._sums += row * step_ms
        self._seen += 1
        if self._seen % EVERY == 0:
            fitted = np.linalg.solve(self._moments + 1e-3 * np.eye(3), self._sums)
            self._each, self._decode, self._prompt = np.maximum(fitted, 0.0).tolist()

    def expected_ms(self, plan: StepPlan) -> float:
        """Of a step, a whole burst included."""
        return plan.num_steps * float(_row(plan) @ (self._each, self._decode, self._prompt))

    @property
    def prompt_tokens(self) -> int:
        """After so many a step takes in no further prompt; 0 where that is not known."""
        return self._tokens(PROMPTS_MS, PASSES)

    def chunk_tokens(self, company: bool) -> int:
        """A step's budget, in `company` of others or alone; 0 where that is not known."""
        return (1 if company else 2) * self._tokens(CHUNK_MS, CHUNK_PASSES)

    def hold_ms(self, decodes: int, prompt_tokens: int, held_ms: float) -> float:
        """How long so many decodes, which have stood back for `held_ms`, would stand back for a step with that much of prompts; 0:
        they should not."""
        takes = self._each + self._prompt * prompt_tokens
        dear = self._decode * decodes > HOLD_PASSES * self._each
        return takes if dear and held_ms + takes <= HOLD_MS else 0.0

    def _tokens(self, ms: float, passes: float) -> int:
        return max(1, int(max(ms, passes * self._each) / self._prompt)) if self._prompt else 0


def _row(plan: StepPlan) -> Floats:
    decodes = int((plan.lengths == 1).sum())
    return np.array((1, decodes, plan.num_tokens - decodes), np.float64)
