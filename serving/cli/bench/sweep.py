"""`pagoda bench sweep`: the time of a decode step at several batch sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from pagoda.serving.cli.bench.alone import Alone, measured
from pagoda.serving.engine.config import Flag


@dataclass(frozen=True)
class SweepOptions:
    """Sizes, and how often."""

    batch_sizes: Annotated[tuple[int, ...], Flag("Requests at a time, each size by itself.", section="Benchmark")] = (1, 2, 4, 8, 16)
    input_len: Annotated[int, Flag("Tokens of each prompt.")] = 32
    output_len: Annotated[int, Flag("Steps that are timed.")] = 64
    num_iters: Annotated[int, Flag("Batches of each size to measure.")] = 3
    vocab: Annotated[int, Flag("Random token ids are drawn from 100 to this.")] = 10_000
    json: Annotated[str | None, Flag("Write the result to a file, or to standard output for -.", ("--output-json",), metavar="FILE")] = None


def run(argv: Sequence[str]) -> int:
    return measured(argv, "sweep", "Time a decode step at several batch sizes.", SweepOptions, _measure)


def _measure(alone: Alone, options: SweepOptions) -> Mapping[str, Sequence[float]]:
    """Of a step: what more tokens take than one does, so that the prompt is left out."""
    found: dict[str, list[float]] = {}
    for size in options.batch_sizes:
        steps = []
        for _ in range(options.num_iters + 1):
            short, long = ([alone.tokens(options.input_len) for _ in range(size)] for _ in range(2))
            first = alone.seconds(short, 1)
            steps.append(1000 * (alone.seconds(long, options.output_len + 1) - first) / options.output_len)
        found[f"batch {size}, ms a step"] = steps[1:]
    return found
