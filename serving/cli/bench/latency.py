"""`pagoda bench latency`: one batch through the engine alone, again and again."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated

import pagoda
from pagoda.hal.errors import ConfigError
from pagoda.serving.cli.bench.load import LoadOptions, asks
from pagoda.serving.cli.bench.report import summary, table, write_json
from pagoda.serving.cli.flags import Parser, build
from pagoda.serving.cli.words import with_model
from pagoda.serving.engine.config import EngineConfig, Flag


@dataclass(frozen=True)
class LatencyOptions:
    """Shape of the batch, and how often."""

    batch_size: Annotated[int, Flag("Prompts in the batch.", section="Benchmark")] = 8
    input_len: Annotated[int, Flag("Tokens of each prompt.")] = 32
    output_len: Annotated[int, Flag("Tokens to generate for each.")] = 128
    num_iters: Annotated[int, Flag("Batches to measure.")] = 10
    num_iters_warmup: Annotated[int, Flag("Batches before that, uncounted.")] = 2
    vocab: Annotated[int, Flag("Random token ids are drawn from 100 to this.")] = 10_000
    json: Annotated[str | None, Flag("Write the result to a file, or to standard output for -.", ("--output-json",), metavar="FILE")] = None

    def __post_init__(self) -> None:
        for name in ("batch_size", "input_len", "output_len", "num_iters"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")


def run(argv: Sequence[str]) -> int:
    parser = Parser("bench latency", "Time one batch through the engine, alone.", "[MODEL] [options]", words=1)
    parser.add_config(LatencyOptions)
    parser.add_config(EngineConfig)
    values = with_model(parser.values(argv))
    options, config = build(LatencyOptions, values), build(EngineConfig, values)
    params = pagoda.SamplingParams(temperature=1.0, max_tokens=options.output_len, ignore_eos=True, detokenize=False)
    seconds = []
    with pagoda.LLM(**vars(config)) as llm:
        for turn in range(options.num_iters_warmup + options.num_iters):
            # fresh prompts each time: a prefix hit would flatter
            load = LoadOptions(num_prompts=options.batch_size, input_len=options.input_len, vocab=options.vocab, seed=turn)
            started = time.perf_counter()
            llm.generate([ask.prompt for ask in asks(load)], params, use_tqdm=False)
            seconds.append(time.perf_counter() - started)
    measured = seconds[options.num_iters_warmup :]
    spreads = {"batch, s": summary(measured), "a step, ms": summary([s / options.output_len * 1000 for s in measured])}
    if options.json != "-":
        print(table(f"{config.model}: {options.batch_size} × ({options.input_len} in, {options.output_len} out)", {}, spreads))
    record = {"kind": "latency", "pagoda": pagoda.__version__, "model": config.model, "options": asdict(options), "seconds": measured}
    write_json(options.json, record | {"seconds_summary": spreads["batch, s"]})
    return 0
