"""`pagoda bench prefix`: time to the first token of a prompt whose beginning is in the cache, beside one whose is not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from pagoda.serving.cli.bench.alone import Alone, measured
from pagoda.serving.engine.config import Flag


@dataclass(frozen=True)
class PrefixOptions:
    """Sizes, and how often."""

    prefix_len: Annotated[int, Flag("Tokens of the common beginning.", section="Benchmark")] = 1024
    suffix_len: Annotated[int, Flag("Tokens behind it, new each time.")] = 32
    num_prompts: Annotated[int, Flag("Prompts at a time.")] = 1
    num_iters: Annotated[int, Flag("Beginnings to measure.")] = 5
    vocab: Annotated[int, Flag("Random token ids are drawn from 100 to this.")] = 10_000
    json: Annotated[str | None, Flag("Write the result to a file, or to standard output for -.", ("--output-json",), metavar="FILE")] = None


def run(argv: Sequence[str]) -> int:
    return measured(argv, "prefix", "Time to the first token with and without a cached beginning.", PrefixOptions, _measure)


def _measure(alone: Alone, options: PrefixOptions) -> Mapping[str, Sequence[float]]:
    found: dict[str, list[float]] = {"not cached, ms": [], "cached, ms": []}
    for turn in range(options.num_iters + 1):
        beginning = alone.tokens(options.prefix_len)
        others = [alone.tokens(options.prefix_len + options.suffix_len) for _ in range(options.num_prompts)]
        alone.seconds([beginning + alone.tokens(options.suffix_len)], 1)
        same = [beginning + alone.tokens(options.suffix_len) for _ in range(options.num_prompts)]
        for name, prompts in zip(found, (others, same), strict=True):
            seconds = alone.seconds(prompts, 1)
            if turn:  # the first one warms up
                found[name].append(1000 * seconds)
    return found
