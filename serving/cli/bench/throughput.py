"""`pagoda bench throughput`: everything queued at once, tokens a second."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated

import pagoda
from pagoda.serving.cli.bench.load import LoadOptions, asks
from pagoda.serving.cli.bench.report import table, write_json
from pagoda.serving.cli.flags import Parser, build
from pagoda.serving.cli.words import with_model
from pagoda.serving.engine.config import EngineConfig, Flag


@dataclass(frozen=True)
class ThroughputOptions:
    """Of `pagoda bench throughput`, beside the load."""

    temperature: Annotated[float, Flag("Sampling temperature.", section="Benchmark")] = 1.0
    n: Annotated[int, Flag("Answers to each prompt.")] = 1
    json: Annotated[str | None, Flag("Write the result to a file, or to standard output for -.", ("--output-json",), metavar="FILE")] = None


def run(argv: Sequence[str]) -> int:
    parser = Parser("bench throughput", "Queue everything at once and count tokens a second.", "[MODEL] [options]", words=1)
    for options_class in (ThroughputOptions, LoadOptions, EngineConfig):
        parser.add_config(options_class)
    values = with_model(parser.values(argv))
    options, load, config = build(ThroughputOptions, values), build(LoadOptions, values), build(EngineConfig, values)
    requests = asks(load)
    params = [
        pagoda.SamplingParams(n=options.n, temperature=options.temperature, max_tokens=ask.output_len, ignore_eos=load.drawn)
        for ask in requests
    ]
    with pagoda.LLM(**vars(config)) as llm:
        llm.generate(requests[0].prompt, params[0], use_tqdm=False)
        started = time.perf_counter()
        outputs = llm.generate([ask.prompt for ask in requests], params)
        seconds = time.perf_counter() - started
    read = sum(len(output.prompt_token_ids) for output in outputs)
    written = sum(len(answer.token_ids) for output in outputs for answer in output.outputs)
    facts = {
        "requests": f"{len(outputs) / seconds:.2f} a second",
        "output": f"{written / seconds:.1f} tokens a second",
        "input + output": f"{(read + written) / seconds:.1f} tokens a second",
    }
    if options.json != "-":
        print(table(f"{config.model}: {len(outputs)} prompts in {seconds:.2f} s", facts, {}))
    record = {"kind": "throughput", "pagoda": pagoda.__version__, "model": config.model, "options": asdict(options), "load": asdict(load)}
    counts = {"seconds": seconds, "input_tokens": read, "output_tokens": written, "output_tokens_per_s": written / seconds}
    rates = {"requests_per_s": len(outputs) / seconds, "total_tokens_per_s": (read + written) / seconds}
    write_json(options.json, record | counts | rates)
    return 0
