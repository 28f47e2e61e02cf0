"""What benchmarks ask: prompts, lengths of answers, and when each request is sent."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import log
from pathlib import Path
from random import Random
from typing import Annotated, Any, NamedTuple

from pagoda.hal.errors import ConfigError
from pagoda.serving.engine.config import Flag

WORDS = ("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state", "family", "group")
RANDOM, SHAREGPT = "random", "sharegpt"
SHAPES = ((161.3, 1.0, 1024), (338.0, 0.9, 1024))
"""Of conversations in ShareGPT's manner, prompts and answers: mean length in tokens, spread of its logarithm, longest."""


class Ask(NamedTuple):
    """One request: a text or token ids, and how many tokens to generate."""

    prompt: str | list[int]
    output_len: int


@dataclass(frozen=True)
class LoadOptions:
    """What to send."""

    dataset: Annotated[
        str,
        Flag("`random`, `sharegpt` for random prompts of lengths as in its conversations, or a file.", ("--dataset-name",), section="Load"),
    ] = RANDOM
    dataset_path: Annotated[
        str | None, Flag("File to take prompts from: ShareGPT's JSON, or a line of JSON with prompt and output_len each.", metavar="FILE")
    ] = None
    num_prompts: Annotated[int, Flag("Requests to send.")] = 100
    input_len: Annotated[int, Flag("Tokens of a random prompt.", ("--random-input-len",))] = 128
    output_len: Annotated[int, Flag("Tokens to generate; the end token is ignored for random prompts.", ("--random-output-len",))] = 128
    sharegpt_output_len: Annotated[int | None, Flag("Tokens to generate for each conversation, in place of its answer's length.")] = None
    range_ratio: Annotated[float, Flag("Draw lengths from (1 − X) to (1 + X) times those.", ("--random-range-ratio",))] = 0.0
    prefix_len: Annotated[int, Flag("Tokens that all random prompts begin with.", ("--random-prefix-len",))] = 0
    vocab: Annotated[int, Flag("Random token ids are drawn from 100 to this.")] = 10_000
    seed: Annotated[int, Flag("Of prompts, lengths and arrival times.")] = 0

    @property
    def drawn(self) -> bool:
        """Prompts are random token ids, not somebody's text."""
        return self.dataset_path is None and self.dataset in (RANDOM, SHAREGPT)

    def __post_init__(self) -> None:
        if self.num_prompts < 1 or self.input_len < 1 or self.output_len < 1:
            raise ConfigError("num_prompts, input_len and output_len must be at least 1")
        if not 0 <= self.range_ratio < 1:
            raise ConfigError(f"range_ratio={self.range_ratio} must be at least 0 and below 1")
        if self.vocab <= 100:
            raise ConfigError(f"vocab={self.vocab} must be above 100")


def asks(options: LoadOptions, as_text: bool = False) -> list[Ask]:
    """The requests; `as_text` makes random prompts of words (about a token each) for endpoints that take no ids."""
    if not options.drawn:
        return _from_file(Path(options.dataset_path or options.dataset), options)
    random = Random(options.seed)
    prefix = [random.randrange(100, options.vocab) for _ in range(options.prefix_len)]
    drawn = []
    for _ in range(options.num_prompts):
        length, output = _lengths(random, options)
        ids = prefix + [random.randrange(100, options.vocab) for _ in range(length)]
        drawn.append(Ask(" ".join(WORDS[i % len(WORDS)] for i in ids) if as_text else ids, output))
    return drawn


def arrivals(count: int, rate: float | Sequence[float], burstiness: float, seed: int) -> list[float]:
    """Seconds after the start at which each request leaves. Gaps are gamma-distributed: burstiness 1 is Poisson, above is smoother.

    `rate`: requests a second, or that after each request.
    """
    if rate == float("inf"):
        return [0.0] * count
    rates = [rate] * count if isinstance(rate, float | int) else rate
    random, now, times = Random(seed), 0.0, []
    for each in rates:
        times.append(now)
        now += random.gammavariate(burstiness, 1 / (each * burstiness))
    return times


def ramp(count: int, start: float, end: float, exponential: bool) -> list[float]:
    """Requests a second after each of `count` requests."""
    shares = [k / max(1, count - 1) for k in range(count)]
    return [start * (end / start) ** share if exponential else start + (end - start) * share for share in shares]


def conversation_lengths(random: Random) -> tuple[int, int]:
    """Of a prompt and its answer, in tokens, as in ShareGPT's conversations."""
    prompt, answer = (
        min(longest, max(4, round(random.lognormvariate(log(mean) - spread**2 / 2, spread)))) for mean, spread, longest in SHAPES
    )
    return prompt, answer


def _lengths(random: Random, options: LoadOptions) -> tuple[int, int]:
    if options.dataset == RANDOM:
        return _near(random, options.input_len, options.range_ratio), _near(random, options.output_len, options.range_ratio)
    prompt, answer = conversation_lengths(random)
    return prompt, options.sharegpt_output_len or answer


def _near(random: Random, length: int, ratio: float) -> int:
    return max(1, random.randint(round(length * (1 - ratio)), round(length * (1 + ratio))))


def _from_file(path: Path, options: LoadOptions) -> list[Ask]:
    try:
        text = path.read_text(encoding="utf-8")
        records = json.loads(text) if text.lstrip().startswith("[") else [json.loads(line) for line in text.splitlines() if line.strip()]
    except OSError as error:
        raise ConfigError(f"--dataset {path}: {error.strerror}; give a file, or `random`") from error
    except ValueError as error:
        raise ConfigError(f"--dataset {path} is neither JSON nor lines of JSON: {error}") from error
    found = [ask for record in records if (ask := _ask(record, options)) is not None]
    if not found:
        raise ConfigError(f"--dataset {path} holds no prompts: expected ShareGPT conversations, or records with a prompt")
    Random(options.seed).shuffle(found)
    return list(_cycled(found, options.num_prompts))


def _ask(record: Any, options: LoadOptions) -> Ask | None:
    if not isinstance(record, dict):
        return None
    turns = record.get("conversations") or record.get("conversation") or []
    texts = [str(turn.get("value") or turn.get("content") or "") for turn in turns if isinstance(turn, dict)]
    if len(texts) >= 2 and texts[0]:
        return Ask(texts[0], options.sharegpt_output_len or max(1, len(texts[1]) // 4))  # four characters a token, as the answer's length
    prompt = record.get("prompt")
    return Ask(prompt, int(record.get("output_len") or options.output_len)) if isinstance(prompt, str | list) and prompt else None


def _cycled(found: Sequence[Ask], count: int) -> Iterator[Ask]:
    for i in range(count):
        yield found[i % len(found)]
