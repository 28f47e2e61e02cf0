"""Every function of the kernels' C ABI on every instruction set of this processor, over buffers that end where nothing may be touched."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from native_cases import FAMILIES, Recording, members, packed_bytes, recordings, write
from native_driver import Run, compile_driver, run_driver
from pagoda.backends.cpu.kernels_native import ACTIVATION_CODES
from pagoda.ops.native.build import library
from pagoda.ops.native.library import _FUNCTIONS, BLOCK_KINDS, here, load


@cache
def _cases(family: str) -> tuple[Recording, ...]:
    return tuple(recordings((family,)))


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_driver(tmp_path_factory.mktemp("driver"))


def _run(driver: Path, cases: list[Recording], levels: tuple[str, ...]) -> Run:
    file = driver.parent / "cases"
    write(file, cases)
    return run_driver(driver, library(), file, levels)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_level_computes_what_is_true(driver: Path, family: str) -> None:
    assert here(), "run python -m pagoda.ops.native.build"
    cases = list(_cases(family))
    result = _run(driver, cases, here())
    assert not result.problems()
    assert len(result.outcomes) == len(cases) * len(here())
    if family not in ("sample", "argmax", "bitmask", "write_kv", "gather"):  # which are exact
        assert all(0 < max(o.worst for o in result.outcomes if o.level == level) <= 1 for level in here())


def test_no_function_is_without_truth() -> None:
    """A new function of the header needs a family, and a family's cases call what they say."""
    assert members() == list(_FUNCTIONS)
    assert sorted(name for family in FAMILIES.values() for name in family.functions) == sorted(members())
    for name, family in FAMILIES.items():
        assert {call[0] for case in _cases(name) for call in case.calls} >= set(family.functions)


def test_no_kind_of_block_or_activation_is_without_truth() -> None:
    assert {case.name.split()[2] for case in _cases("quant")} >= set(BLOCK_KINDS)
    codes = {call[1][3] for case in _cases("activation") for call in case.calls}
    assert codes == set(ACTIVATION_CODES.values())


def test_levels_are_chosen_by_argument() -> None:
    assert [load(level).isa for level in here()] == list(here())
    assert load().isa in here()


def test_the_driver_sees_what_is_wrong(driver: Path) -> None:
    """A number past the end read or written, an unwritten output, a wrong truth, a changed input."""
    case = next(case for case in _cases("exp_row") if case.name.endswith(" 257"))
    function, arguments, returns = case.calls[0]
    out, x = case.buffers
    short_output = replace(case, buffers=[replace(out, size=256 * 4), x], checks=[])
    short_input = replace(case, buffers=[out, replace(x, content=x.content[:-4], size=256 * 4)])
    for broken in (short_output, short_input):
        result = _run(driver, [case, broken], ("baseline",))
        assert result.outcomes[0].good
        assert "not its own" in result.problems()[0]
    nothing = replace(case, calls=[(function, (*arguments[:2], 256, *arguments[3:]), float("nan"))])
    wrong = replace(case, checks=[(where, kind, allowed, want * 1.001) for where, kind, allowed, want in case.checks])
    returned = replace(case, calls=[(function, arguments, returns * 1.001)])
    problems = _run(driver, [nothing, wrong, returned], ("baseline",)).problems()
    assert len(problems) == 3
    assert "nan, not" in problems[0]


def test_packed_sizes_are_those_promised() -> None:
    assert packed_bytes("Q4_0", 64, 33) == 2 * 2 * (512 + 64)
