"""The later steps of a burst: what a captured step reads is packed once for each of them, and copied into its place on the device."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from pagoda.serving.engine.layout import DTYPES, FIRST, Layout
from pagoda.serving.engine.plan import ON_DEVICE, IntArray, StepPlan


class Burst(NamedTuple):
    """The longest burst of a device, and its most rows."""

    steps: int = 1
    rows: int = 0


class BurstViews(NamedTuple):
    """On the device: the bytes that a captured step reads, and those that belong there in each later step."""

    live: torch.Tensor
    later: tuple[torch.Tensor, ...]


class _Places(NamedTuple):
    """Of each later step and row: the position of its token, and whether the row is still in the burst."""

    positions: IntArray
    here: NDArray[np.bool_]


def fill_later(
    out: NDArray[np.uint8], buffer: NDArray[np.uint8], layout: Layout, plan: StepPlan, page_sizes: tuple[int, ...], nobody: int
) -> None:
    """Write the later steps into `out` `[K - 1, layout.fixed]`; `buffer` has the first. A row whose run has ended goes on as padding:
    it writes page 0, and leaves its token in slot `nobody`."""
    assert plan.runs is not None
    out[:] = buffer[FIRST : FIRST + layout.fixed]
    rows, steps = plan.num_rows, np.arange(1, len(out) + 1, dtype=np.int32)[:, None]
    places = _Places(plan.starts + steps, steps < plan.runs)
    _view(out, layout, "token_ids")[:, :rows] = ON_DEVICE
    _view(out, layout, "positions")[:, 0, :rows] = np.where(places.here, places.positions, 0)
    _view(out, layout, "seq_lens")[:, :rows] = np.where(places.here, places.positions + 1, 1)
    if "draws" in layout.sections:
        _view(out, layout, "draws")[:, :rows] += steps
    for group, size in enumerate(page_sizes):
        _view(out, layout, "kv_slots")[:, group, :rows] = _kv_slots(plan.block_tables[group], size, places)
    if not places.here.all():
        slots = _view(out, layout, "sample_slots")[:, :rows]
        slots[~places.here] = nobody


def _kv_slots(table: IntArray, size: int, places: _Places) -> NDArray[np.int64]:
    if not size:
        return np.zeros_like(places.positions, np.int64)
    which = np.minimum(places.positions // size, table.shape[1] - 1)
    pages = table[np.arange(len(table)), which].astype(np.int64)
    slots: NDArray[np.int64] = np.where(places.here, pages * size + places.positions % size, 0)
    return slots


def _view(out: NDArray[np.uint8], layout: Layout, name: str) -> NDArray[Any]:
    section = layout.sections[name]
    begin = section.offset - FIRST
    return out[:, begin : begin + section.nbytes].view(DTYPES[section.dtype]).reshape(len(out), *section.shape)
