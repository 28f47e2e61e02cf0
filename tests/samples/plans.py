"""Step plans by hand for tests: sequences with their own pages in every group, no scheduler."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from pagoda.serving.engine.params import SamplingParams
from pagoda.serving.engine.plan import ON_DEVICE, Admission, StepPlan, StepResult
from pagoda.serving.engine.runner import Runner

GREEDY = SamplingParams(temperature=0, max_tokens=64)


@dataclass
class Sequence:
    """One sequence: its tokens as far as the host knows them, its pages, how much is in the cache."""

    slot: int
    tokens: list[int]
    params: SamplingParams = GREEDY
    first_page: int = 0
    computed: int = 0
    prompt_len: int = 0
    admitted: bool = False
    eos_ids: tuple[int, ...] = ()
    table: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.prompt_len = self.prompt_len or len(self.tokens)

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_len :]


class Hand:
    """Makes plans for sequences and runs them. Each sequence has `PAGES` pages of its own in each group."""

    PAGES = 16

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.step = 0

    def sequence(self, slot: int, tokens: list[int], params: SamplingParams = GREEDY, **facts: object) -> Sequence:
        groups = len(self.runner.pages.page_sizes)
        first = 1 + slot * groups * self.PAGES
        table = [list(range(first + group * self.PAGES, first + (group + 1) * self.PAGES)) for group in range(groups)]
        return Sequence(slot, list(tokens), params, table=table, **facts)  # type: ignore[arg-type]

    def plan(self, *parts: tuple[Sequence, int], on_device: bool = False, **rest: object) -> StepPlan:
        """A step that gives each sequence so many of its tokens; one-token rows last, as the contract says."""
        parts = tuple(sorted(parts, key=lambda part: part[1] == 1))
        rows = [sequence for sequence, _ in parts]
        counts = np.array([count for _, count in parts], np.int32)
        starts = np.array([row.computed for row in rows], np.int32)
        admissions = tuple(
            Admission(row.slot, row.params, tuple(row.tokens[: row.prompt_len]), tuple(row.output), eos_ids=row.eos_ids)
            for row in rows
            if not row.admitted
        )
        ids = [self._ids(row, count, on_device) for row, count in parts]
        plan = StepPlan(
            step=self.step,
            slots=np.array([row.slot for row in rows], np.int32),
            starts=starts,
            lengths=counts,
            token_ids=np.concatenate(ids).astype(np.int32),
            block_tables=self._tables(rows),
            sampled=np.array([row.computed + count >= len(row.tokens) for row, count in parts]),
            bound=np.zeros(len(rows), bool),
            draws=np.array([len(row.output) for row in rows], np.int32),
            admissions=admissions,
            **rest,  # type: ignore[arg-type]
        )
        self.step += 1
        for row, count in parts:
            row.admitted, row.computed = True, row.computed + count
        self.rows = rows
        return plan

    def run(self, *parts: tuple[Sequence, int], **rest: object) -> StepResult:
        """Plan, run, and append the sampled tokens to their sequences."""
        plan = self.plan(*parts, **rest)  # type: ignore[arg-type]
        result = self.runner.run(plan)
        for row, tokens in zip([row for row, yes in zip(self.rows, plan.sampled) if yes], result.tokens):
            row.tokens.append(int(tokens[0]))
        return result

    def burst(self, rows: list[Sequence], runs: list[int]) -> StepResult:
        """Give each sequence as many tokens as `runs` says in one plan, and append them."""
        ordered = self.plan(*((row, 1) for row in rows))
        assert self.rows == rows
        result = self.runner.run(replace(ordered, runs=np.array(runs, np.int32)))
        for row, tokens, count in zip(rows, result.tokens.tolist(), runs, strict=True):
            row.tokens += tokens[:count]
            row.computed += count - 1
        return result

    def generate(self, sequence: Sequence, count: int, chunk: int = 64) -> list[int]:
        """Prefill by chunks, then decode until `count` tokens are out."""
        while len(sequence.output) < count:
            self.run((sequence, min(chunk, len(sequence.tokens) - sequence.computed)))
        return sequence.output

    def _ids(self, row: Sequence, count: int, on_device: bool) -> np.ndarray:
        ids = np.array((row.tokens + [ON_DEVICE] * count)[row.computed : row.computed + count])
        return np.full(1, ON_DEVICE) if on_device and count == 1 and row.computed >= row.prompt_len else ids

    def _tables(self, rows: list[Sequence]) -> tuple[np.ndarray, ...]:
        return tuple(np.array([row.table[group] for row in rows], np.int32) for group in range(len(self.runner.pages.page_sizes)))
