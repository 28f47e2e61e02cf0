"""Kernels for TPUs beyond the references; none yet: the references trace."""

from __future__ import annotations

from collections.abc import Iterable

from pagoda.hal.kernel import Kernel


def tpu_kernels() -> Iterable[Kernel]:
    return ()
