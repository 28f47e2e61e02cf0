"""What a primitive is: `Op`, and `Case`, one generated use of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from pagoda.hal.kernel import Kernel, KernelRun

if TYPE_CHECKING:
    import torch

DTYPE_EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7, "float8_e4m3fn": 2.0**-3}
"""Relative spacing of the dtypes that numbers are computed or kept in; the unit of every tolerance."""


@dataclass(frozen=True)
class Case:
    """One use of a primitive with concrete inputs.

    Attributes:
        label: what is particular about it ("ragged", "block+1", …).
        facts: static facts of the use (a `hal.kernel.Facts`).
        args: positional inputs of `run` after the packed weights; tensors, or records of tensors.
        weights: inputs of `pack`; empty where the primitive has none.
        mutates: indices of `args` that `run` writes in place; they are compared after the result, where there is one.
        batch: index of the argument that `plan` is given; its result takes the place of the argument after it.
        consumes: indices of `args` whose content `run` may destroy.
        clears: indices of `args` whose NaN, which stands where nothing is, `run` may overwrite with zeros.
    """

    label: str
    facts: Any
    args: tuple[Any, ...]
    weights: Mapping[str, torch.Tensor] = field(default_factory=dict)
    mutates: tuple[int, ...] = ()
    batch: int | None = None
    consumes: tuple[int, ...] = ()
    clears: tuple[int, ...] = ()


BY_ROW = frozenset({"capturable", "batch_invariant"})
"""Claims of a reference whose rows torch computes one by one, or whose arithmetic does not depend on where in a vector a number stands."""


class Part(NamedTuple):
    """A piece of a case that must give the same numbers alone: its case, and the rows of the whole's outputs that it is."""

    case: Case
    rows: slice


@dataclass(frozen=True)
class Op:
    """A primitive.

    Attributes:
        name: as in the kernel table.
        reference: `(facts) → KernelRun`; plain torch, static shapes, no synchronisation.
        oracle: `(case) → outputs` in float64, written independently of the reference; integers are compared exactly, NaN stands for
            an unspecified finite number.
        tolerance: `(case) → largest allowed error`, relative to the oracle's largest magnitude.
        generate: `(torch.Generator, dtype name) → cases` on the CPU: empty, one, block ± 1, ragged, strided, large.
        split: `(case) → parts`, for the test of batch invariance; outputs have one row per row of the batch.
        dtypes: dtypes that the reference computes in.
        claims: what the reference may be held to on any device; none waits for the device.
    """

    name: str
    reference: Callable[[Any], KernelRun]
    oracle: Callable[[Case], Any]
    tolerance: Callable[[Case], float]
    generate: Callable[[torch.Generator, str], Iterator[Case]]
    split: Callable[[Case], Iterator[Part]]
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    claims: frozenset[str] = frozenset({"capturable"})

    def reference_kernel(self) -> Kernel:
        """The reference as a candidate of the kernel table, ranked below everything else."""
        path = f"{self.reference.__module__}:{self.reference.__qualname__}"
        return Kernel(self.name, "reference", path, rank=-1.0, claims=self.claims)
