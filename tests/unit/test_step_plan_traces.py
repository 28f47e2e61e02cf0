"""Refactors prove sameness: fixed traces plan what the committed file says (style: step plans are recorded)."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from pagoda.serving.engine.trace import digest_plan
from scheduler_toy import Toy
from scheduler_traces import GOLDEN, TRACES, run_trace


@pytest.mark.parametrize("name", sorted(TRACES))
def test_plans_are_those_recorded(name):
    recorded = json.loads(GOLDEN.read_text())[name]
    planned = [json.loads(line) for line in run_trace(name)]
    differ = [i for i, (one, other) in enumerate(zip(recorded, planned)) if one != other]
    assert not differ, f"first of {len(differ)} differing steps: {recorded[differ[0]]} became {planned[differ[0]]}"
    assert len(recorded) == len(planned)


def test_a_digest_sees_every_change():
    toy = Toy()
    toy.submit("a", range(10), max_tokens=4)
    plan = toy.plan()
    other = [
        replace(plan, starts=plan.starts + 1),
        replace(plan, token_ids=plan.token_ids[::-1]),
        replace(plan, sampled=~plan.sampled),
        replace(plan, block_tables=tuple(table + 1 for table in plan.block_tables)),
        replace(plan, admissions=()),
    ]
    assert len({digest_plan(one)["digest"] for one in (plan, *other)}) == 6
    assert digest_plan(replace(plan, slots=plan.slots.astype(np.int64)))["digest"] == digest_plan(plan)["digest"]
