"""How much of the memory's read rate a decode step at batch 1 reaches on the CPU: `python benchmarks/read_share.py [MODEL]`.

A step reads every packed weight of a product once, and K and V of its context. Those bytes by the step's time, over the rate at which this
machine reads in the same run: before and after, by torch's sum of 1 GiB and by the native product with one row, whichever is faster.
Prints one JSON line; `--write FILE` keeps it.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from decode import measure
from pagoda import LLM
from pagoda.hal.kernel import KernelRun
from pagoda.hal.kv import DTYPE_BYTES
from pagoda.hal.table import Choice
from pagoda.ops.native.library import GemmArgs, load
from pagoda.serving.engine import target
from pagoda.serving.engine.config import EngineConfig

_PRODUCTS = ("gemm", "gemm_gguf")


@dataclass
class Read:
    """What a step reads: bytes of packed weights, and bytes of K and V a token for each layer's pages."""

    weights: int = 0
    pages: dict[int, int] = field(default_factory=dict)


class Counted:
    """A kernel that adds to `read` what it keeps of each weight, or which pages it is given."""

    def __init__(self, read: Read, choice: Choice, run: KernelRun) -> None:
        self._read, self._choice, self._inner = read, choice, run
        self.plan = run.plan

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def pack(self, weights: Any, out: Any | None = None) -> Any:
        kernel, facts = self._choice.chosen, self._choice.facts
        if self._choice.op in _PRODUCTS:
            kept = kernel.packed_bytes(facts) if kernel.packed_bytes else sum(w.numel() * w.itemsize for w in weights.values())
            self._read.weights += kept
        return self._inner.pack(weights, out)

    def share(self, packed: Any) -> Any:
        """A head that multiplies by the embedding's table."""
        kernel = self._choice.chosen
        assert kernel.packed_bytes is not None
        self._read.weights += kernel.packed_bytes(self._choice.facts)
        return self._inner.share(packed)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        if self._choice.op == "paged_attention":
            facts: Any = self._choice.facts
            self._read.pages[args[1].data_ptr()] = facts.num_kv_heads * (facts.head_dim + facts.v_dim) * DTYPE_BYTES[facts.kv_dtype]
        return self._inner.run(*args, **kwargs)


@contextmanager
def counted(read: Read) -> Iterator[None]:
    plain = target.kernel_table
    target.kernel_table = lambda backend, info, policy, wrap: plain(backend, info, policy, partial(Counted, read))
    try:
        yield
    finally:
        target.kernel_table = plain


def read_rate(seconds: float = 1.5) -> float:
    """Bytes a second: the best pass of either reader over 1 GiB."""
    native, numbers = load(), torch.ones(1 << 28)
    inner, outer = 4096, numbers.numel() // 4096
    args = GemmArgs(inner, outer, 0, 0, numbers.data_ptr(), None)
    x, out = torch.ones(1, inner), torch.empty(1, outer)
    product = partial(native.gemm, ctypes.addressof(args), x.data_ptr(), inner, 1, out.data_ptr(), outer, torch.get_num_threads())
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        for run in (numbers.sum, product):
            start = time.perf_counter()
            run()
            best = min(best, time.perf_counter() - start)
    return numbers.numel() * 4 / best


def share(options: argparse.Namespace) -> dict[str, Any]:
    read = Read()
    before = read_rate()
    settings: dict[str, Any] = {"max_num_seqs": 1, "kv_cache_memory_bytes": 1 << 29, "enable_prefix_caching": False, "device": "cpu"}
    with counted(read), LLM(options.model, dtype=options.dtype, **settings) as llm:
        step = measure(llm, 1, options)
    rate = max(before, read_rate())
    context = options.prompt + options.tokens / 2
    total = read.weights + context * sum(read.pages.values())
    return {
        "weight_bytes": read.weights,
        "kv_bytes": int(context * sum(read.pages.values())),
        "ms_step": step["ms_step"],
        "step_gb_s": round(total / step["ms_step"] / 1e6, 2),
        "read_gb_s": round(rate / 1e9, 2),
        "share": round(total / step["ms_step"] * 1e3 / rate, 3),
        "share_of_best_step": round(total / step["best"] * 1e3 / rate, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=EngineConfig().model)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=129)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", type=Path, help="a file for the result, e.g. docs/perf/results/read-share-NAME.json")
    options = parser.parse_args()
    options.temperature = 0.0
    name = Path(options.model).name
    facts = {"command": f"python benchmarks/read_share.py {name} --dtype {options.dtype}", "model": name, "dtype": options.dtype}
    facts |= {"isa": load().isa, "threads": torch.get_num_threads(), "cores": os.cpu_count(), "machine": platform.machine()}
    result = facts | {"date": time.strftime("%Y-%m-%d", time.gmtime())} | share(options)
    print(json.dumps(result))
    if options.write:
        options.write.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
