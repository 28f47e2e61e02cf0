"""How long steps take on these ranks, learnt from those before, and what follows: who shares a step, and when the next is planned."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from pagoda.serving.engine.plan import StepPlan

Floats = NDArray[np.float64]

EVERY, MEMORY = 16, 0.75
"""Steps between two looks at what they took, and what the steps of a look weigh at the next: the last 60 or so count."""
SHRINK = 0.02
"""A cost that cannot be told from a step's own stays what it was, and at first nothing."""
OUTLIER = 4.0
"""A step that took so many times what was expected and a millisecond, or as much less, says nothing: some wait for what comes once.
Where a quarter of them did, steps have changed and what was known is void."""
SETTLED = 2
"""Who shares a step depends on what steps cost once it has stayed the same for so many looks."""
DECODES, TOKENS = 8, 32
"""Rows are dear where so many decodes, and so many tokens of a prompt, take as long as a step without any: on devices that arithmetic
limits. Elsewhere steps are filled as far as budget and pages last."""
PROMPTS_MS, PASSES = 25.0, 10.0
"""Where rows are dear, a prompt is the last that a step takes in once its prompts take so long, and so many times what a step costs
without any rows: those behind it come sooner or as soon in a step of their own, and steps are not made for less."""
CHUNK_MS, CHUNK_PASSES, ALONE = 150.0, 20.0, 4
"""The same for the chunk of a prompt where others wait for the step's end; so many times as much where others may only come."""
HOLD_MS, HOLD_PASSES = 150.0, 1.0
"""Decodes stand back for prompts no longer than this at a time, and only where their rows cost more than so many steps without any."""
SLOW_MS = 5.0
"""Steps that take less are planned as soon as they may be."""
SPARE_MS, SPARE = 1.5, 0.05
"""A slow step's follower is planned so long and this share of the step before it ends, by what is expected."""
LEAST_S = 1e-4
"""It is not worth while to wait for less."""
MOST_SPARE, CALM = 0.75, 0.97
"""The share doubles, up to here, when a step has ended before its follower was planned, and shrinks by this factor when not."""


class Work(NamedTuple):
    """What a step computes: rows of one token, drafts apart, and tokens of prompts or drafts."""

    decodes: int
    tokens: int


class Pace:
    """A step's time as so much for itself, for each decode and for each token of a prompt (least squares that forget).

    Until steps have been noted all is taken to cost nothing: nobody waits for anybody.
    """

    def __init__(self) -> None:
        self._moments: Floats = np.zeros((3, 3))
        self._sums, self._costs = np.zeros(3), np.zeros(3)
        self._seen: list[tuple[float, ...]] = []
        self._looks = 0
        self._each, self._decode, self._prompt = 0.0, 0.0, 0.0

    def note(self, plan: StepPlan, step_ms: float) -> None:
        """The ranks took so long for a step; of a burst each of its steps."""
        self._seen.append((1.0, *work_of(plan), step_ms))
        if len(self._seen) == EVERY:
            self._look(np.array(self._seen))
            self._seen.clear()

    def expected_ms(self, plan: StepPlan) -> float:
        """Of a step, a whole burst included."""
        return plan.num_steps * self._one_ms(work_of(plan))

    @property
    def dear(self) -> bool:
        """Whether rows cost so much that who shares a step matters."""
        told_apart = self._looks >= SETTLED and self._decode > 0.0 and self._prompt > 0.0
        return told_apart and self._each <= min(DECODES * self._decode, TOKENS * self._prompt)

    @property
    def prompt_tokens(self) -> int:
        """After so many a step takes in no further prompt; 0: any number."""
        return self._tokens(PROMPTS_MS, PASSES) if self.dear else 0

    def chunk_tokens(self, company: bool) -> int:
        """A step's budget, in `company` of others or alone; 0: whatever is configured."""
        return (1 if company else ALONE) * self._tokens(CHUNK_MS, CHUNK_PASSES) if self.dear else 0

    def hold_ms(self, decodes: int, prompt_tokens: int, held_ms: float) -> float:
        """How long so many decodes, which have stood back for `held_ms`, would stand back for a step with that much of prompts; 0:
        they should not."""
        takes = self._each + self._prompt * prompt_tokens
        gains = self.dear and self._decode * decodes > HOLD_PASSES * self._each
        return takes if gains and held_ms + takes <= HOLD_MS else 0.0

    def _one_ms(self, work: Work) -> float:
        return self._each + self._decode * work.decodes + self._prompt * work.tokens

    def _tokens(self, ms: float, passes: float) -> int:
        return max(1, int(max(ms, passes * self._each) / self._prompt))

    def _look(self, seen: Floats) -> None:
        work, took = seen[:, :3], seen[:, 3]
        expected = work @ self._costs
        usual = (took <= OUTLIER * (expected + 1.0)) & (OUTLIER * took >= expected)
        if np.count_nonzero(usual) > EVERY - EVERY // 4:
            self._learn(work[usual], took[usual], MEMORY if self._looks else 0.0)
            self._looks += 1
        else:
            self._learn(work, np.minimum(took, OUTLIER * (np.median(took) + 1.0)), 0.0)
            self._looks = 0

    def _learn(self, work: Floats, took: Floats, memory: float) -> None:
        self._moments = memory * self._moments + work.T @ work
        self._sums = memory * self._sums + work.T @ took
        held = self._moments.diagonal() * (0.0, SHRINK, SHRINK) + 1e-3
        change = np.linalg.solve(self._moments + np.diag(held), self._sums - self._moments @ self._costs)
        self._costs = np.maximum(self._costs + change, 0.0)
        self._each, self._decode, self._prompt = self._costs.tolist()


class Due:
    """When the next step is planned: whoever comes before is in it. A step that takes little is followed at once, since a device that
    waits for its host loses more than a newcomer gains; a slow one shortly before its end."""

    def __init__(self) -> None:
        self._spare, self._waited = SPARE, False

    def left_s(self, elapsed_s: float, expected_ms: float, host_s: float) -> float:
        """How long to wait still, with a step that has run for `elapsed_s`; `host_s`: what planning takes."""
        if expected_ms < SLOW_MS:
            return 0.0
        left = 1e-3 * ((1 - self._spare) * expected_ms - SPARE_MS) - elapsed_s - 2 * host_s
        if left < LEAST_S:
            return 0.0
        self._waited = True
        return left

    def planned(self, late: bool) -> None:
        """The next step was given to the ranks; `late`: when the one before had ended."""
        if self._waited:
            self._spare = min(MOST_SPARE, 2 * self._spare) if late else max(SPARE, CALM * self._spare)
        self._waited = False


def work_of(plan: StepPlan) -> Work:
    """What a step computes; of a burst, each of its steps."""
    rows, tokens = plan.num_rows, plan.num_tokens
    if rows == tokens:
        return Work(rows, 0)
    decodes = int(np.count_nonzero(plan.lengths == 1))
    if plan.drafts is not None:
        decodes += int(np.count_nonzero(plan.drafts[:, 0] >= 0))
    return Work(decodes, tokens - decodes)
