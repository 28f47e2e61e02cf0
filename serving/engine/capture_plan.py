"""Which steps are captured, in order of likely use: those that first answers need before the first request, the others later."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from pagoda.hal.graphs import GraphPolicy
from pagoda.serving.engine.batch import Bucket
from pagoda.serving.engine.cascade import FEWEST_ROWS
from pagoda.serving.engine.params import SamplingParams
from pagoda.serving.engine.rare_columns import SPLIT
from pagoda.serving.engine.settings import Use

FEW_TOKENS = 1024
"""Prompts up to here are captured for few rows too."""

SPREAD = 4
"""Of decode steps so many rows stand for one until its size is captured: both read all weights, which takes most of the time."""

PADDING = 512
"""Tokens of padding, or as many as the step has, that a step with prompts takes the device less time for than it takes its host."""

NEARLY = 1.5
"""With prompts, a captured step with up to so many times a step's tokens and rows is nearly as good as one of its own, which would cost
somebody the time of a capture and seldom come again."""

DRAWS = Use.RANDOM | Use.FILTER
"""Uses that change a step without changing the number of its rows."""


@dataclass(frozen=True)
class Job:
    """A step to capture: its sizes, whether it has prompts, what its rows need of the sampler (`settings.Use`), whether they may have
    adapters, how many tokens they begin with alike, and in which cache groups (none: in all)."""

    bucket: Bucket
    prompts: bool = False
    use: int = Use.RANDOM
    adapted: bool = False
    shared: int = 0
    alike: tuple[bool, ...] = ()

    @property
    def params(self) -> SamplingParams:
        """Settings of rows with this use."""
        heat, mass = float(bool(self.use & Use.RANDOM)), 0.9 if self.use & Use.FILTER else 1.0
        return SamplingParams(temperature=heat, seed=0, top_p=mass, logit_bias={0: 1.0} if self.use & SPLIT else {})

    def __str__(self) -> str:
        kind = "prompts" if self.prompts else "decode"
        more = " with adapters" * self.adapted + f" behind {self.shared} shared tokens" * bool(self.shared)
        return f"{kind} of {self.bucket.tokens} tokens in {self.bucket.rows} rows, sampled with {self.use}{more}"


class Wanted(NamedTuple):
    """What is captured before the first request, and afterwards, in order."""

    first: tuple[Job, ...] = ()
    later: tuple[Job, ...] = ()


def bucket_of(sizes: tuple[int, ...], wanted: int) -> int | None:
    """The smallest of ascending `sizes` that holds `wanted`."""
    return next((size for size in sizes if size >= wanted), None)


def nearly_as_good(taken: Bucket, wanted: Bucket) -> bool:
    """Whether a step with prompts that is padded to `taken` costs little more than one that is padded to `wanted`."""
    return (taken.tokens or 0) + (taken.rows or 0) <= NEARLY * ((wanted.tokens or 0) + (wanted.rows or 0))


def wanted_captures(policy: GraphPolicy, rows: int, tokens: int, lazy: bool, adapters: bool, beginning: int) -> Wanted:
    """What to capture for steps of up to `rows` rows and `tokens` tokens.

    lazy: only what first answers need comes first: for every step a captured size that is not much larger. The largest leads, since
    later captures then fit into its memory. adapters: rows may have any. beginning: tokens of the shortest shared one, 0: none.
    """
    if policy.mode == "eager" or not policy.at_start:
        return Wanted()
    decodes, prompts = decode_rows(policy, rows), prompt_buckets(policy, tokens, rows)
    kinds = product((False, True) if adapters else (False,), (0, Use.RANDOM))
    every = tuple(job for adapted, use in kinds for job in _jobs(decodes, prompts, use, adapted, beginning))
    if not lazy:
        return Wanted(every)
    first = tuple(
        Job(bucket, prompts=True) for bucket in _ladder(prompts, policy.prompt_rows)
    ) + tuple(Job(Bucket(size, size)) for size in ladder(decodes, SPREAD))  # fmt: skip
    return Wanted(first, tuple(job for job in sorted(every, key=_likely) if job not in first))


def ladder(sizes: tuple[int, ...], factor: int) -> tuple[int, ...]:
    """Of descending `sizes` as few as leave none whose next larger one is more than `factor` times as large, if that can be."""
    kept: list[int] = []
    for size, below in zip(sizes, (*sizes[1:], 0), strict=False):
        if not kept or below * factor < kept[-1]:
            kept.append(size)
    return tuple(kept)


def decode_rows(policy: GraphPolicy, most: int) -> tuple[int, ...]:
    """Sizes of decode steps up to `most` rows, largest first."""
    used = {policy.row_bucket(rows) for rows in range(1, most + 1)}
    return tuple(sorted(used & set(policy.row_buckets), reverse=True))


def prompt_buckets(policy: GraphPolicy, tokens: int, rows: int) -> tuple[Bucket, ...]:
    """Of steps with prompts: those of `tokens`, the most of a step, with up to `rows` rows, all sizes with the most rows, and those of
    few tokens and rows, for which a first request should not wait longer than later ones."""
    largest, most = bucket_of(policy.prompt_tokens, tokens), bucket_of(policy.prompt_rows, rows) or 0
    if largest is None or not most:
        return ()
    tall = [Bucket(largest, size) for size in reversed(policy.prompt_rows) if size <= min(most, tokens)]
    fewest = policy.prompt_rows[0]
    few = [Bucket(size, fewest) for size in policy.prompt_tokens if fewest <= size <= min(FEW_TOKENS, tokens) and fewest <= most]
    wide = [Bucket(size, most) for size in reversed(policy.prompt_tokens) if 2 * most <= size < largest and size % most == 0]
    return tuple(dict.fromkeys((*tall, *few, *wide)))


def _jobs(decodes: tuple[int, ...], prompts: tuple[Bucket, ...], use: int, adapted: bool, beginning: int) -> list[Job]:
    jobs = [Job(Bucket(size, size), use=use, adapted=adapted) for size in decodes]
    if not use:
        return jobs
    # Those of random rows serve greedy ones too, and those with prompts take the device as long as real ones.
    # Kernels are the same for any number of rows, and what is captured later takes less than a tenth of a second: powers of two will do.
    alike = [size for size in decodes if beginning and size >= FEWEST_ROWS and not size & (size - 1)]
    shared = [Job(Bucket(size, size), False, use, adapted, beginning) for size in alike]
    return [Job(bucket, True, use, adapted) for bucket in prompts] + jobs + shared


def _ladder(prompts: tuple[Bucket, ...], prompt_rows: tuple[int, ...]) -> tuple[Bucket, ...]:
    """Of each size one with the most rows, or the only one there is; every second power of two is enough."""
    widest: dict[int, Bucket] = {}
    for bucket in prompts:
        assert bucket.tokens is not None and bucket.rows is not None
        if bucket.tokens not in widest or bucket.rows > (widest[bucket.tokens].rows or 0):
            widest[bucket.tokens] = bucket
    return tuple(widest[size] for size in ladder(tuple(sorted(widest, reverse=True)), 2))


def _likely(job: Job) -> tuple[bool, bool, bool, int]:
    """Without adapters before those with them, plain ones before shared ones, decode steps before prompts, small before large."""
    return job.adapted, job.shared > 0, job.prompts, job.bucket.tokens or 0
