"""`pagoda bench compare-peers`: llama.cpp, vLLM and transformers beside Pagoda, in alternating turns under the same load."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pagoda.hal.errors import ConfigError
from pagoda.models.loading.reference import resolve
from pagoda.serving.cli.bench.peers import engines
from pagoda.serving.cli.bench.peers.comparison import Comparison, as_text
from pagoda.serving.cli.bench.peers.engines import Engine
from pagoda.serving.cli.bench.peers.generators import generator
from pagoda.serving.cli.bench.peers.rows import Row, chosen
from pagoda.serving.cli.bench.peers.turn import take_turn, warm_page_cache
from pagoda.serving.cli.collect_env import collect
from pagoda.serving.cli.flags import Parser, build, options_of
from pagoda.serving.cli.words import with_model
from pagoda.serving.engine.config import EngineConfig, Flag


@dataclass(frozen=True)
class PeerOptions:
    """Whom to compare with, and how long."""

    cpu: Annotated[bool, Flag("Compare on this machine's processor.", section="Comparison")] = False
    llama_server: Annotated[str | None, Flag("Program of llama.cpp to compare with.", metavar="PATH")] = None
    gguf: Annotated[str | None, Flag("The same weights for llama.cpp, when the model is a folder.", metavar="FILE")] = None
    vllm_python: Annotated[str | None, Flag("Python of the environment that holds vLLM's CPU build.", metavar="PATH")] = None
    transformers: Annotated[bool, Flag("Compare with transformers, in this environment.")] = False
    rows: Annotated[tuple[str, ...], Flag("Rows to measure; all when not given.", metavar="NAME")] = ()
    rounds: Annotated[int, Flag("Turns that each engine gets.")] = 3
    turns: Annotated[int | None, Flag("Most turns of this call; with --json the next call goes on where this one ended.")] = None
    loadgen: Annotated[str | None, Flag("Folder with a loadgen.py to load the servers with, instead of our own.", metavar="DIR")] = None
    vocab: Annotated[int, Flag("Random token ids are drawn from 100 to this.")] = 10_000
    json: Annotated[
        str | None, Flag("Keep the turns in a file; those that are in it are not taken again.", ("--output-json",), metavar="FILE")
    ] = None

    def __post_init__(self) -> None:
        if not self.cpu:
            raise ConfigError("compare-peers compares on processors only: say --cpu")
        if self.rounds < 1 or (self.turns is not None and self.turns < 0):
            raise ConfigError(f"rounds={self.rounds} must be at least 1 and turns={self.turns} not negative")


def run(argv: Sequence[str]) -> int:
    parser = Parser("bench compare-peers", "Pagoda and other engines by turns, under the same load.", "[MODEL] --cpu [options]", words=1)
    parser.add_config(PeerOptions)
    parser.add_config(EngineConfig)
    values = with_model(parser.values(argv))
    options, config = build(PeerOptions, values), build(EngineConfig, values)
    rows = chosen(options.rows)
    path = resolve(config.model, config.revision, cache=config.download_dir)
    contestants = engines_of(options, config, path, rows)
    comparison = _opened(options, path, contestants)
    generate = generator(options.loadgen)
    left = list(_left(comparison, contestants, options.rounds, rows))
    for number, engine, lacking in left[: options.turns]:
        warm_page_cache(path)
        turn = take_turn(engine, lacking, generate, options.vocab)
        record = {"engine": engine.name, "round": number, "at": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())}
        comparison.turns.append({**record, "others": round(turn.others, 3), "values": turn.values})
        print(f"{engine.name} {number + 1}: " + ", ".join(f"{name} {value:.4g}" for name, value in turn.values.items()), flush=True)
        if options.json is not None:
            comparison.write(Path(options.json))
    print(as_text(comparison))
    return 0


def engines_of(options: PeerOptions, config: EngineConfig, path: Path, rows: tuple[Row, ...]) -> list[Engine]:
    """Pagoda first. Raises `ConfigError` for a peer that cannot run this model."""
    found = [engines.pagoda([str(path), *_given(config)])]
    slots = max((row.load.together for row in rows if row.load), default=1)
    if options.llama_server is not None:
        found.append(engines.llama_cpp(options.llama_server, Path(options.gguf) if options.gguf else path, slots))
    if options.vllm_python is not None:
        found.append(engines.vllm(options.vllm_python, path))
    if options.transformers:
        found.append(engines.transformers(path, [row.name for row in rows if row.load]))
    return found


def _given(config: EngineConfig) -> Iterator[str]:
    """The engine's options as words, those that are not at their defaults."""
    for option in options_of(EngineConfig):
        value = getattr(config, option.name)
        if value == option.default or option.name in ("model", "revision", "device"):
            continue
        if option.kind == "bool":
            yield option.names[0] if value else option.names[0].replace("--", "--no-", 1)
        else:
            yield from (option.names[0], json.dumps(value) if isinstance(value, dict) else str(value))


def _opened(options: PeerOptions, path: Path, contestants: list[Engine]) -> Comparison:
    described = {engine.name: {"version": engine.version, "command": engine.shown} for engine in contestants}
    file = Path(options.json) if options.json is not None else None
    if file is None or not file.exists():
        return Comparison(path.name, collect()["machine"], described, [])
    comparison = Comparison.read(file)
    if comparison.model != path.name:
        raise ConfigError(f"{file} holds a comparison on {comparison.model}, not on {path.name}; name another file")
    comparison.engines |= described
    return comparison


def _left(
    comparison: Comparison, contestants: list[Engine], rounds: int, rows: tuple[Row, ...]
) -> Iterator[tuple[int, Engine, tuple[Row, ...]]]:
    """Each round in the other direction, so that no engine is always first after a pause."""
    for number in range(rounds):
        for engine in contestants if number % 2 == 0 else reversed(contestants):
            lacking = comparison.missing(engine.name, number, tuple(row for row in rows if row.name not in engine.lacks))
            if lacking:
                yield number, engine, lacking
