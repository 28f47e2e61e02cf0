"""`pagoda bench perplexity`: how well a model foretells a text, in windows that slide over it."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import pagoda
from pagoda.hal.errors import ConfigError
from pagoda.serving.cli.bench.report import table, write_json
from pagoda.serving.cli.flags import Parser, build
from pagoda.serving.cli.words import with_model
from pagoda.serving.engine.config import EngineConfig, Flag

TOGETHER = 16
"""Windows that are sent at once: their logprobs are all in memory."""


@dataclass(frozen=True)
class PerplexityOptions:
    """The text and the windows over it."""

    text: Annotated[str, Flag("File with the text.", metavar="FILE", section="Benchmark")] = ""
    window: Annotated[int | None, Flag("Tokens that the model sees at once; all that it can when not given.", metavar="N")] = None
    stride: Annotated[
        int | None, Flag("Tokens from one window to the next; the window when not given. Less is slower and truer.", metavar="N")
    ] = None
    max_tokens: Annotated[int | None, Flag("Score the text's first N tokens alone.", metavar="N")] = None
    json: Annotated[str | None, Flag("Write the result to a file, or to standard output for -.", ("--output-json",), metavar="FILE")] = None

    def __post_init__(self) -> None:
        if not self.text:
            raise ConfigError("bench perplexity needs a text: --text FILE")
        for name, least in (("window", 2), ("stride", 1), ("max_tokens", 2)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name}={value} must be at least {least}")
        if self.window is not None and self.stride is not None and self.stride > self.window:
            raise ConfigError(f"stride={self.stride} leaves tokens out between windows of {self.window}: it must not be larger")


class Window(NamedTuple):
    """Tokens `[begin, end)` of the text, of which those from `scored` on count."""

    begin: int
    end: int
    scored: int


def windows(count: int, window: int, stride: int) -> Iterator[Window]:
    """Those over `count` tokens that score each once. A window's own first token has nothing before it: where windows do not overlap
    it counts in none."""
    done = 0
    for begin in range(0, count, stride):
        end, scored = min(begin + window, count), max(done, begin + 1)
        if end > scored:
            yield Window(begin, end, scored)
        done = end
        if end == count:
            return


def run(argv: Sequence[str]) -> int:
    parser = Parser("bench perplexity", "How well a model foretells a text.", "[MODEL] --text FILE [options]", words=1)
    parser.add_config(PerplexityOptions)
    parser.add_config(EngineConfig)
    values = with_model(parser.values(argv))
    options, config = build(PerplexityOptions, values), build(EngineConfig, values)
    text = _read(Path(options.text))
    with pagoda.LLM(**vars(config)) as llm:
        started = time.perf_counter()
        result = {"kind": "perplexity", "pagoda": pagoda.__version__, "model": config.model, "options": asdict(options)}
        result |= measure(llm, text, options) | {"seconds": time.perf_counter() - started}
    if options.json != "-":
        facts = {"perplexity": f"{result['perplexity']:.4f}", "nats a token": f"{result['nats_per_token']:.5f}"}
        facts |= {"bits a byte": f"{result['bits_per_byte']:.5f}"} if result["bits_per_byte"] is not None else {}
        facts |= {"tokens": f"{result['scored']} of {result['tokens']}, in windows of {result['window']} every {result['stride']}"}
        print(table(f"{config.model}: {options.text}", facts, {}))
    write_json(options.json, result)
    return 0


def measure(llm: pagoda.LLM, text: str, options: PerplexityOptions) -> dict[str, float | int | None]:
    """Perplexity of the text; bits a byte where all of it was scored."""
    ids = llm.tokenizer.encode(text)
    ids, whole = ids[: options.max_tokens], options.max_tokens is None or options.max_tokens >= len(ids)
    if len(ids) < 2:
        raise ConfigError(f"--text {options.text} has {len(ids)} tokens; it takes two to foretell one")
    longest = llm.processor.facts.max_model_len - 1  # a token is generated behind each window
    window = options.window or longest
    if window > longest:
        raise ConfigError(f"window={window} is above what the model can see here: at most {longest} tokens")
    stride = options.stride or window
    planned = list(windows(len(ids), window, min(stride, window)))
    total = sum(sum(_scores(llm, ids, planned[at : at + TOGETHER])) for at in range(0, len(planned), TOGETHER))
    scored = sum(one.end - one.scored for one in planned)
    bits = -total / math.log(2) / len(text.encode()) if whole else None
    return {
        "perplexity": math.exp(-total / scored), "nats_per_token": -total / scored, "bits_per_byte": bits,
        "tokens": len(ids), "scored": scored, "window": window, "stride": stride,
    }  # fmt: skip


def _scores(llm: pagoda.LLM, ids: Sequence[int], planned: Sequence[Window]) -> Iterator[float]:
    params = pagoda.SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False)
    outputs = llm.generate([list(ids[one.begin : one.end]) for one in planned], params, use_tqdm=False)
    for one, output in zip(planned, outputs, strict=True):
        assert output.prompt_logprobs is not None
        for at in range(one.scored, one.end):
            entry = output.prompt_logprobs[at - one.begin]
            assert entry is not None
            yield entry[ids[at]].logprob


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--text {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--text {path} is not UTF-8: {error}") from error
