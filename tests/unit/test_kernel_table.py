"""KernelTable: what it chooses, what it explains, what explicit, strict and batch-invariant policies refuse."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from pagoda.hal.errors import KernelError
from pagoda.hal.info import DeviceInfo, Feature
from pagoda.hal.kernel import Kernel, Needs
from pagoda.hal.table import KernelPolicy, KernelTable


@dataclass(frozen=True)
class Facts:
    dtype: str = "float32"
    width: int = 64


INFO = DeviceInfo("v", "m", "a1", 0, 1 << 30, frozenset({"float32"}), frozenset({Feature.INT8}))
REFERENCE = Kernel("gemm", "reference", "math:sqrt", rank=-1.0, claims=frozenset({"batch_invariant"}))
FAST = Kernel("gemm", "fast", "math:sqrt", Needs(archs=frozenset({"a1"})), rank=2.0)
WIDE = Kernel("gemm", "wide", "math:sqrt", Needs(facts={"width": (128,)}), rank=3.0)


def table(*kernels: Kernel, policy: KernelPolicy | None = None) -> KernelTable:
    return KernelTable(INFO, kernels, policy)


def test_highest_fitting_rank_wins_and_the_rest_is_explained() -> None:
    kernels = table(REFERENCE, FAST, WIDE)
    choice = kernels.choose("gemm", Facts())
    assert choice.chosen is FAST
    assert {kernel.name: reason for kernel, reason in choice.passed_over} == {
        "wide": "width must be one of 128, not 64",
        "reference": "ranked below fast",
    }
    assert kernels.choose("gemm", Facts(width=128)).chosen is WIDE
    assert [c.chosen.name for c in kernels.explain()] == ["fast", "wide"]


@pytest.mark.parametrize(
    ("needs", "reason"),
    [
        (Needs(archs=frozenset({"b", "c"})), "needs b or c, the device is a1"),
        (Needs(features=frozenset({Feature.FP8, Feature.INT8})), "the device lacks fp8"),
        (Needs(dtypes=frozenset({"bfloat16"})), "computes bfloat16, not float32"),
        (Needs(facts_on={"a1": {"width": (16, 32)}, "b": {"width": (64,)}}), "width must be one of 16, 32 on a1, not 64"),
        (Needs(packages=("no_such_package",)), "package no_such_package is not installed"),
    ],
)
def test_each_need_gives_its_reason(needs: Needs, reason: str) -> None:
    choice = table(REFERENCE, Kernel("gemm", "picky", "math:sqrt", needs, rank=9.0)).choose("gemm", Facts())
    assert choice.chosen is REFERENCE
    assert choice.passed_over[0][1] == reason


def test_accepts_has_the_last_word_and_rank_may_depend_on_facts() -> None:
    odd = Kernel("gemm", "odd", "math:sqrt", accepts=lambda facts: "width is even" if facts.width % 2 == 0 else None, rank=5.0)
    small = Kernel("gemm", "small", "math:sqrt", rank=lambda facts: 10.0 - facts.width)
    kernels = table(REFERENCE, odd, small)
    assert kernels.choose("gemm", Facts(width=64)).chosen is REFERENCE
    assert kernels.choose("gemm", Facts(width=63)).chosen is odd
    assert kernels.choose("gemm", Facts(width=1)).chosen is small


def test_explicit_choice_is_kept_or_refused() -> None:
    kernels = table(REFERENCE, FAST, WIDE, policy=KernelPolicy(explicit={"gemm": "reference"}))
    assert kernels.choose("gemm", Facts()).chosen is REFERENCE
    unfit = table(REFERENCE, FAST, WIDE, policy=KernelPolicy(explicit={"gemm": "wide"}))
    with pytest.raises(KernelError, match="width must be one of 128, not 64"):
        unfit.choose("gemm", Facts())
    with pytest.raises(KernelError, match="registered: fast, reference"):
        table(REFERENCE, FAST, policy=KernelPolicy(explicit={"gemm": "nope"}))
    with pytest.raises(KernelError, match="no such primitive; there are gemm"):
        table(REFERENCE, policy=KernelPolicy(explicit={"gem": "fast"}))


def test_strict_refuses_the_reference_with_the_reasons() -> None:
    strict = table(REFERENCE, WIDE, policy=KernelPolicy(strict=True))
    with pytest.raises(KernelError, match=r"would fall back to the reference .*width must be"):
        strict.choose("gemm", Facts())
    assert strict.choose("gemm", Facts(width=128)).chosen is WIDE


def test_batch_invariant_takes_only_claimants() -> None:
    choice = table(REFERENCE, FAST, policy=KernelPolicy(batch_invariant=True)).choose("gemm", Facts())
    assert choice.chosen is REFERENCE
    assert choice.passed_over == ((FAST, "does not claim batch invariance"),)


def test_nothing_fits_names_every_candidate() -> None:
    with pytest.raises(KernelError, match="wide: width must be"):
        table(WIDE).choose("gemm", Facts())
    with pytest.raises(KernelError, match="nothing is registered"):
        table().choose("rope", Facts())


def test_implementation_loads_at_resolution_only_and_once() -> None:
    broken = Kernel("gemm", "broken", "no_such_module:Run")
    kernels = table(broken)
    assert kernels.choose("gemm", Facts()).chosen is broken
    with pytest.raises(KernelError, match="no_such_module"):
        kernels.resolve("gemm", Facts())
    real = table(Kernel("gemm", "real", "pagoda.hal.kernel:PlainKernel"))
    run = real.resolve("gemm", Facts())
    assert run is real.resolve("gemm", Facts())
    assert run is not real.resolve("gemm", Facts(width=1))
