"""Two load generators with one face: the measurement of `pagoda bench serve`, or a `loadgen.py` that somebody else wrote."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from pagoda.hal.errors import ConfigError, PagodaError
from pagoda.serving.cli.bench.load import LoadOptions
from pagoda.serving.cli.bench.peers.rows import Load, Seen
from pagoda.serving.cli.bench.serve import ServeOptions, measure

Generator = Callable[[str, str, Load, int], Seen]
"""(address, model, load, vocabulary) → what was seen. Raises `PagodaError` when a request failed."""


def generator(folder: str | None) -> Generator:
    """The one in `folder`, which holds a `loadgen.py` with a function `bench`; our own for None."""
    if folder is None:
        return ours
    module = _module(Path(folder).expanduser() / "loadgen.py")

    def theirs(url: str, model: str, load: Load, vocab: int) -> Seen:
        shape = (load.prompt, load.answer, load.together, load.requests, 1)
        seen = module.bench(url, model, *shape, shared=load.shared, vocab=vocab, silent=True)[0]
        if seen["failed"]:
            raise PagodaError(f"{seen['failed']} of {load.requests} requests failed: {'; '.join(seen['errors'])}")
        return Seen(seen["tpot_p50_ms"], seen["ttft_p50_ms"], seen["output_tps"])

    return theirs


def ours(url: str, model: str, load: Load, vocab: int) -> Seen:
    options = ServeOptions(url=url, model=model, max_concurrency=load.together, num_warmups=0, ignore_eos=True)
    lengths = {"input_len": load.prompt - load.shared, "output_len": load.answer, "prefix_len": load.shared}
    seed = time.time_ns()  # prompts that nobody has cached
    seen = asyncio.run(measure(options, LoadOptions(num_prompts=load.requests, vocab=vocab, seed=seed, **lengths)))
    if seen["failed"]:
        raise PagodaError(f"{seen['failed']} of {load.requests} requests failed: {'; '.join(seen['errors'])}")
    return Seen(seen["tpot_ms"].get("p50", 0.0), seen["ttft_ms"]["p50"], seen["output_tokens_per_s"])


def _module(path: Path) -> ModuleType:
    spec = spec_from_file_location("loadgen", path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise ConfigError(f"--loadgen {path.parent}: there is no loadgen.py; give its folder, or leave the flag out for our own generator")
    module = sys.modules["loadgen"] = module_from_spec(spec)  # dataclasses look their module up by name
    sys.path.insert(0, str(path.parent))  # it imports its neighbours
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent))
    return module
