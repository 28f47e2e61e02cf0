"""Columns of a step that most steps lack: penalties, edits, masks, logprobs, drafts, taps, and what media bring."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pagoda.serving.engine.plan import IntArray, LongArray, StepPlan
from pagoda.serving.engine.samples import Samples
from pagoda.serving.engine.settings import EDITS, SamplingSlots, Use

SPLIT = Use.PENALTY | EDITS | Use.ALLOWED | Use.LOGPROBS
"""Uses whose work depends on how many rows have them: it runs after a captured step, not inside."""

WHOLE = Use.RANDOM | Use.FILTER | SPLIT
"""What a step with any of them does for all its rows where shapes are static."""

EDIT_BUCKETS = (64, 4096)
"""Edits that a step with static shapes is padded to; more are padded to a multiple of the last."""

COUNTED = {
    "penalties": "penalty_rows", "paths": "path_rows", "edits": "edit_rows", "masks": "mask_rows", "logprobs": "logprob_rows",
    "spans": "span_rows", "whole": "span_first", "taps": "tap_layers", "tapped": "tap_rows",
}  # fmt: skip
"""Dimensions that are the length of a column."""


@dataclass(frozen=True)
class Extras:
    """Columns of a step that only some models or features bring; all optional.

    Attributes:
        positions: `[axes, T]` int64, in place of the plan's own positions (multimodal sections).
        span_rows, span_sources: `[E]` int64, token of the step and row of the embedding store that replaces it (media).
        span_first, span_end: `[E]` int64, where the item begins and ends whose tokens see each other in both directions.
    """

    positions: LongArray | None = None
    span_rows: LongArray | None = None
    span_sources: LongArray | None = None
    span_first: LongArray | None = None
    span_end: LongArray | None = None


def rare_columns(plan: StepPlan, slots: SamplingSlots, samples: Samples, use: int, extras: Extras) -> dict[str, NDArray[Any]]:
    """Columns that most steps lack. Row indices are into the samples."""
    chosen = plan.slots[samples.rows]
    rare: dict[str, NDArray[Any]] = {name: value for name, value in vars(extras).items() if value is not None and name != "positions"}
    if plan.drafts is not None:
        rare["drafts"] = plan.drafts
    if plan.parents is not None:
        rare["parents"] = plan.parents
    if plan.tapped is not None:
        rare["tap_layers"] = np.array(plan.taps, np.int32)
        rare["tap_rows"] = np.flatnonzero(np.repeat(plan.tapped, plan.lengths))
    if use & Use.PENALTY:
        rows = slots.rows_with(chosen, Use.PENALTY)
        rare["penalty_rows"] = rows
        for name in ("repetition", "presence", "frequency"):
            rare[name] = getattr(slots, name)[chosen[rows]]
        if plan.drafts is not None:
            rare.update(_drafts_counted(plan, samples, rows))
    if use & EDITS:
        ahead = samples.paths(plan) if plan.drafts is not None and use & Use.BAD_WORDS else None
        edits = slots.edits(chosen, plan.draws[samples.rows] + samples.depths.astype(np.int32), ahead)
        rare.update(edit_rows=edits.rows, edit_ids=edits.ids, edit_values=edits.values)
    if use & Use.ALLOWED:
        rare["mask_rows"], rare["masks"] = slots.masks(chosen, *_grammar(plan, samples))
    if use & Use.LOGPROBS:
        rare["logprob_rows"] = slots.rows_with(chosen, Use.LOGPROBS)
    return rare


def whole_columns(rare: dict[str, NDArray[Any]], slots: SamplingSlots, chosen: IntArray, rows: int) -> dict[str, NDArray[Any]]:
    """The columns of `WHOLE` for `rows` rows, whichever of them `rare` has for how many: neutral where nothing is asked."""
    every = np.arange(rows)
    columns = {**rare, "penalty_rows": every, "mask_rows": every, "logprob_rows": every}
    for name, neutral in (("repetition", 1), ("presence", 0), ("frequency", 0)):
        columns[name] = np.full(rows, neutral, np.float32)
        columns[name][: len(chosen)] = getattr(slots, name)[chosen]
    columns["masks"] = every_mask(rare, slots, rows)["masks"]
    edits = len(rare.get("edit_rows", ()))
    most = next((size for size in EDIT_BUCKETS if size >= edits), -(-edits // EDIT_BUCKETS[-1]) * EDIT_BUCKETS[-1])
    for name, kind in (("edit_rows", np.int64), ("edit_ids", np.int64), ("edit_values", np.float32)):
        columns[name] = np.zeros(most, kind)
        columns[name][:edits] = rare.get(name, ())
    return columns


def every_mask(rare: dict[str, NDArray[Any]], slots: SamplingSlots, rows: int) -> dict[str, NDArray[Any]]:
    """`rare` with a mask for each of `rows` rows: all is allowed where it has none."""
    if len(rare.get("mask_rows", ())) == rows:
        return rare
    masks = np.full((rows, (slots.vocab + 31) // 32), -1, np.int32)
    if "mask_rows" in rare:
        masks[rare["mask_rows"]] = rare["masks"]
    return {**rare, "mask_rows": np.arange(rows), "masks": masks}


def _drafts_counted(plan: StepPlan, samples: Samples, penalties: LongArray) -> dict[str, NDArray[Any]]:
    """For penalties: the drafts before each sample that has them, and what says which samples count."""
    paths = samples.paths(plan)
    rows = [row for row, sample in enumerate(penalties.tolist()) for _ in paths[sample]]
    ids = [token for sample in penalties.tolist() for token in paths[sample]]
    drafts = [path[-1] if path else -1 for path in paths]
    columns = {"path_rows": rows, "path_ids": ids, "sample_draft": drafts}
    return {name: np.array(values, np.int64) for name, values in columns.items()} | {"sample_before": samples.before}


def _grammar(plan: StepPlan, samples: Samples) -> tuple[LongArray, IntArray | None]:
    """A plan's masks, their rows counted among the samples; masks of rows that are not sampled are dropped."""
    if plan.mask_rows is None or plan.masks is None:
        return np.empty(0, np.int64), None
    if plan.mask_nodes is None and len(plan.mask_rows) == len(samples.rows) == plan.num_rows:
        return samples.rows, plan.masks
    kept = np.isin(plan.mask_rows, samples.rows)
    masks = plan.masks if kept.all() else plan.masks[kept]
    firsts = np.searchsorted(samples.rows, plan.mask_rows[kept])
    return firsts if plan.mask_nodes is None else firsts + plan.mask_nodes[kept], masks
