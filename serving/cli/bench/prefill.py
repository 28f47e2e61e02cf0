"""`pagoda bench prefill`: prompts of several lengths, tokens read a second."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from pagoda.serving.cli.bench.alone import Alone, measured
from pagoda.serving.engine.config import Flag


@dataclass(frozen=True)
class PrefillOptions:
    """Lengths, and how often."""

    input_lens: Annotated[tuple[int, ...], Flag("Tokens of the prompts, each length by itself.", section="Benchmark")] = (128, 512, 1024)
    batch_size: Annotated[int, Flag("Prompts at a time.")] = 1
    num_iters: Annotated[int, Flag("Batches of each length to measure.")] = 5
    vocab: Annotated[int, Flag("Random token ids are drawn from 100 to this.")] = 10_000
    json: Annotated[str | None, Flag("Write the result to a file, or to standard output for -.", ("--output-json",), metavar="FILE")] = None


def run(argv: Sequence[str]) -> int:
    return measured(argv, "prefill", "Read prompts of several lengths, with one token of answer.", PrefillOptions, _measure)


def _measure(alone: Alone, options: PrefillOptions) -> Mapping[str, Sequence[float]]:
    found: dict[str, list[float]] = {}
    for length in options.input_lens:
        batches = [[alone.tokens(length) for _ in range(options.batch_size)] for _ in range(options.num_iters + 1)]
        seconds = [alone.seconds(batch, 1) for batch in batches][1:]
        found[f"{length} tokens, tok/s"] = [options.batch_size * length / s for s in seconds]
    return found
