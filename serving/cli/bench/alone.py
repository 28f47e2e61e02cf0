"""What the benchmarks of an engine alone share: an engine in this process, fresh random prompts, a measurement for each of some values."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import pagoda
from pagoda.serving.cli.bench.report import summary, table, write_json
from pagoda.serving.cli.flags import Parser, build
from pagoda.serving.cli.words import with_model
from pagoda.serving.engine.config import EngineConfig

FIRST = 100
"""Token ids below are left out: tokenizers keep special ones there."""


class Alone:
    """An engine whose prompts nobody has seen before."""

    def __init__(self, llm: pagoda.LLM, vocab: int) -> None:
        self._llm, self._ids, self._draw = llm, range(FIRST, vocab), random.Random(0)

    def tokens(self, count: int) -> list[int]:
        return self._draw.choices(self._ids, k=count)

    def seconds(self, prompts: Sequence[list[int]], output_len: int) -> float:
        """Until all are answered with so many tokens."""
        params = pagoda.SamplingParams(temperature=1.0, max_tokens=output_len, ignore_eos=True, detokenize=False)
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        began = time.perf_counter()
        self._llm.generate(asked, params, use_tqdm=False)
        return time.perf_counter() - began


Measure = Callable[[Alone, Any], Mapping[str, Sequence[float]]]
"""(engine, options) → values of one quantity a name."""


def measured(argv: Sequence[str], kind: str, about: str, options_class: type, measure: Measure) -> int:
    """Run a benchmark: its options and the engine's from `argv`, a table of spreads, and a JSON record."""
    parser = Parser(f"bench {kind}", about, "[MODEL] [options]", words=1)
    parser.add_config(options_class)
    parser.add_config(EngineConfig)
    values = with_model(parser.values(argv))
    options, config = build(options_class, values), build(EngineConfig, values)
    with pagoda.LLM(**vars(config)) as llm:
        found = measure(Alone(llm, options.vocab), options)
    spreads = {name: summary(numbers) for name, numbers in found.items()}
    if options.json != "-":
        print(table(f"{config.model}: {kind}", {}, spreads))
    record = {"kind": kind, "pagoda": pagoda.__version__, "model": config.model, "options": asdict(options)}
    write_json(options.json, {**record, "values": {name: list(numbers) for name, numbers in found.items()}, "summary": spreads})
    return 0
