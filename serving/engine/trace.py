"""Step-plan traces: what a scheduler planned, in a form that can be compared bit for bit after a change that should change nothing."""

from __future__ import annotations

from hashlib import blake2b
from typing import TypedDict

import numpy as np
from pagoda.serving.engine.plan import StepPlan


class PlanDigest(TypedDict):
    """One step: sizes to read, and a digest over everything that the ranks are told."""

    step: int
    rows: int
    tokens: int
    admitted: int
    copied: int
    digest: str


def digest_plan(plan: StepPlan) -> PlanDigest:
    """Equal for equal plans, on any machine."""
    hasher = blake2b(digest_size=8)
    arrays = [plan.slots, plan.starts, plan.lengths, plan.token_ids, plan.sampled, plan.bound, plan.draws, *plan.block_tables]
    for array in arrays:
        hasher.update(repr(array.shape).encode())
        hasher.update(np.ascontiguousarray(array, dtype="<i4").tobytes())
    for admission in plan.admissions:
        hasher.update(repr((admission.slot, admission.prompt, admission.output, admission.sequence)).encode())
    copies = plan.copies
    if copies is not None:
        hasher.update(repr((copies.source.tolist(), copies.target.tolist())).encode())
    return PlanDigest(
        step=plan.step,
        rows=plan.num_rows,
        tokens=plan.num_tokens,
        admitted=len(plan.admissions),
        copied=0 if copies is None else len(copies.target),
        digest=hasher.hexdigest(),
    )
