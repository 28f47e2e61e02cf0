"""Products whose descriptors stray are found in what a disassembler writes, and others are not."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

_SPEC = importlib.util.spec_from_file_location("cross_descriptors", Path(__file__).parents[2] / "ci" / "cross_descriptors.py")
assert _SPEC is not None and _SPEC.loader is not None
_MODULE = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(_MODULE)
strays_of = _MODULE.strays_of

PLACE = ("S2R R4, SR_TID.X", "UMOV UR4, 0x400", "SHF.R.U32.HI R4, RZ, 0x5, R4", "IADD3 R5, P0, R4, 0x40, RZ", "MOV R6, 0x80000020")
"""The place of a tile, from the thread's number."""
INTO_UNIFORM = ("R2UR UR18, R5", "R2UR UR19, R6")
PRODUCT = "HGMMA.64x32x16.F32.BF16 R24, R44, gdesc[UR16].tnspB, R24, gsb0"


def written(*instructions: str) -> str:
    return "\n".join(f"        /*{16 * i:04x}*/                   {one} ;" for i, one in enumerate(instructions))


def test_a_descriptor_of_constants_and_the_thread_is_right() -> None:
    assert strays_of(written(*PLACE, *INTO_UNIFORM, PRODUCT)) == []


@pytest.mark.parametrize(
    "source", ["LDG.E R5, desc[UR8][R2.64+0x4]", "LDS R5, [R2]", "LDC R5, c[0x0][0x2b8]", "ULDC.64 UR18, c[0x0][0x2b8]"]
)
def test_one_that_follows_from_data_or_an_argument_strays(source: str) -> None:
    before = (*PLACE, source, *INTO_UNIFORM) if source.split()[1].startswith("R") else (*PLACE, *INTO_UNIFORM, source)
    text = written(*before, "FADD R44, R44, R45", PRODUCT)
    assert strays_of(text) == [f"{16 * (len(before) + 1):04x}"]


def test_a_copy_into_shared_memory_writes_no_register() -> None:
    assert strays_of(written(*PLACE, "LDGSTS.E.BYPASS.128 [R2+0x1c000], desc[UR46][R38.64], P2", *INTO_UNIFORM, PRODUCT)) == []


def test_it_is_followed_through_sums_and_a_threads_own_memory() -> None:
    text = written(
        *PLACE, "LDC R8, c[0x0][0x2b8]", "IADD3 R5, P1, R8, R4, RZ", "STL.64 [R1+0xc0], R4", "LDL.64 R4, [R1+0xc0]", *INTO_UNIFORM, PRODUCT
    )
    assert strays_of(text) == [f"{16 * 11:04x}"]
    beside = ("LDC R4, c[0x0][0x2b8]", "STL.64 [R1+0xc0], R4", "STL [R1+0xc8], RZ", "LDL.64 R4, [R1+0xc0]")
    assert strays_of(written(*PLACE, *beside, *INTO_UNIFORM, PRODUCT)) == []  # the argument is R4 alone
    # What is written over is forgotten, but not where that may not happen.
    assert strays_of(written(*PLACE, "LDG.E R5, desc[UR8][R2.64]", "MOV R5, 0x40", *INTO_UNIFORM, PRODUCT)) == []
    assert strays_of(written(*PLACE, "LDG.E R5, desc[UR8][R2.64]", "@P0 MOV R5, 0x40", *INTO_UNIFORM, PRODUCT)) != []


def test_an_operand_in_registers_leaves_its_descriptor_open() -> None:
    """Two uniform registers in front of the other operand's are then anything; with both in shared memory they count."""
    stray = (*PLACE, *INTO_UNIFORM, "ULDC.64 UR16, c[0x0][0x2b8]")
    assert strays_of(written(*stray, PRODUCT)) == []
    assert strays_of(written(*stray, PRODUCT.replace("R44, gdesc", "gdesc"))) == [f"{16 * 8:04x}"]


def test_what_comes_around_a_loop_counts() -> None:
    loop = written(PRODUCT, *PLACE, "LDG.E R5, desc[UR8][R2.64]", *INTO_UNIFORM, "@P0 BRA `(.L_x_0)", "EXIT")
    assert strays_of(".L_x_0:\n" + loop) == ["0000"]
    assert strays_of(".L_x_0:\n" + loop.replace("@P0 BRA", "@P0 NOP")) == []


def test_what_another_branch_does_does_not_count() -> None:
    """The branch that stands first leaves an argument where the tile's place is in the other."""
    lines = written(
        *PLACE, "@P0 BRA `(.L_x_1)", *INTO_UNIFORM, PRODUCT, "LDC R5, c[0x0][0x2b8]", "EXIT", *INTO_UNIFORM, PRODUCT, "EXIT"
    ).splitlines()
    assert strays_of("\n".join([*lines[:11], ".L_x_1:", *lines[11:]])) == []
    assert strays_of("\n".join([*(one.replace("EXIT", "NOP") for one in lines[:11]), ".L_x_1:", *lines[11:]])) == [f"{16 * 13:04x}"]


def test_threads_that_parted_meet_again() -> None:
    """One way to where they meet leaves an argument in the tile's place."""
    lines = written(
        *PLACE, "BSSY B0, `(.L_x_2)", "@P0 BRA `(.L_x_1)", "BSYNC B0", "LDC R5, c[0x0][0x2b8]", "BSYNC B0", *INTO_UNIFORM, PRODUCT
    ).splitlines()
    assert strays_of("\n".join([*lines[:8], ".L_x_1:", *lines[8:10], ".L_x_2:", *lines[10:]])) == [f"{16 * 12:04x}"]


def test_a_barrier_that_is_used_again_meets_where_it_was_last_told() -> None:
    """The first meeting place is reached from the first BSYNC alone, which stands before an argument is in the tile's place."""
    lines = written(
        *PLACE, "BSSY B0, `(.L_x_1)", "BSYNC B0", *INTO_UNIFORM, PRODUCT, "LDC R5, c[0x0][0x2b8]", "BSSY B0, `(.L_x_2)", "BSYNC B0", "EXIT"
    ).splitlines()
    assert strays_of("\n".join([*lines[:7], ".L_x_1:", *lines[7:13], ".L_x_2:", *lines[13:]])) == []
