"""Sixty damaged and hostile checkpoints: refused with an error of our own, or the right answer; `ci/mutated_checkpoints.py` draws more."""

from __future__ import annotations

from pathlib import Path

import pytest
from mutated import answer, cases, make_bases, run_case


@pytest.mark.heavy
def test_no_checkpoint_crashes_hangs_or_lies(tmp_path: Path) -> None:
    bases = make_bases(tmp_path / "bases")
    sound = {name: answer(path) for name, path in bases.items()}
    ended = [(case.base, case.kind, run_case(case, sound[case.base])) for case in cases(bases, tmp_path, 7, 60)]
    assert [one for one in ended if one[2].fault] == []
    assert sum(outcome.ended == "refused" for *_, outcome in ended) > 30
    assert all(len(outcome.message) > 20 for *_, outcome in ended if outcome.ended == "refused")
