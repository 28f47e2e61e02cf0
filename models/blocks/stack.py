"""A model's mixers as one: the page sizes that all allow, their pages, and what their kernels plan of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pagoda.hal.errors import ConfigError, ModelError
from pagoda.hal.kernel import KernelRun
from pagoda.hal.kv import LayerPages, StatePages
from pagoda.hal.table import KernelTable
from pagoda.ops.attention import PagedBatch


class OnPages:
    """What models have in common whose layers keep pages: mixers in the order of the layers; None and mixers without a cache have none.

    `table` is None of a model that is only described.
    """

    def __init__(self, mixers: Sequence[Any], table: KernelTable | None) -> None:
        self._mixers, self._kernels = mixers, table
        self._planners: list[list[KernelRun]] = []

    def page_sizes(self) -> tuple[int, ...]:
        """See `Model.page_sizes`."""
        table = self._kernel_table()
        allowed = [mixer.page_sizes(table) for mixer in self._mixers if mixer is not None]
        sizes = tuple(size for size in table.info.limits.page_sizes if all(size in some for some in allowed))
        if not sizes:
            raise ModelError(f"no page size of {table.info.limits.page_sizes} has an attention kernel for every layer; see `pagoda plan`")
        return sizes

    def bind(self, pages: Sequence[LayerPages | StatePages | None], group_of_layer: Sequence[int], page_sizes: Sequence[int]) -> None:
        """See `Model.bind`."""
        table = self._kernel_table()
        self._planners = [[] for _ in page_sizes]
        for mixer, own, group in zip(self._mixers, pages, group_of_layer, strict=True):
            if mixer is None or mixer.cache is None:
                continue
            planners = self._planners[group]
            mixer.bind(table, own, group, page_sizes[group], 0)
            if mixer.kernel is None:
                continue
            if mixer.kernel not in planners:
                planners.append(mixer.kernel)
            mixer.bind(table, own, group, page_sizes[group], planners.index(mixer.kernel))

    def plan(self, groups: tuple[PagedBatch, ...], buffers: tuple[Any, ...] | None = None) -> tuple[Any, ...]:
        """Per group, what each distinct attention kernel of its mixers planned."""
        old = buffers or tuple((None,) * len(planners) for planners in self._planners)
        return tuple(
            tuple(kernel.plan(batch, buffer) for kernel, buffer in zip(planners, own, strict=True))
            for planners, batch, own in zip(self._planners, groups, old, strict=True)
        )

    def _kernel_table(self) -> KernelTable:
        if self._kernels is None:
            raise ConfigError("this model was only described; load it with a kernel table to run it")
        return self._kernels
