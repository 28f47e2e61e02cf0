"""A turn of transformers, in a process of its own: `python -m … FOLDER ROW…` tells its first token, then its rows as JSON."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from statistics import median

import torch
from pagoda.serving.cli.bench.peers.rows import BY_NAME, Load
from transformers import AutoModelForCausalLM


def main(arguments: list[str]) -> int:
    folder, *names = arguments
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()

    def seconds(batch: int, prompt: int, answer: int) -> float:
        ids = torch.randint(100, model.config.vocab_size, (batch, prompt))
        started = time.perf_counter()
        with torch.inference_mode():
            lengths = {"max_new_tokens": answer, "min_new_tokens": answer}
            made = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **lengths)
        assert made.shape[1] == prompt + answer
        return time.perf_counter() - started

    seconds(1, 3, 1)
    print("first token", flush=True)  # whoever started this process takes the time
    values = {name: _MEASURED[name](seconds, load) for name in names if name in _MEASURED and (load := BY_NAME[name].load)}
    print(json.dumps(values))
    return 0


Seconds = Callable[[int, int, int], float]


def _batch1(seconds: Seconds, load: Load) -> float:
    seconds(1, load.prompt, 8)
    turns = [seconds(1, load.prompt, load.answer) - seconds(1, load.prompt, 1) for _ in range(load.requests)]
    return median(turns) * 1000 / (load.answer - 1)


def _prefill(seconds: Seconds, load: Load) -> float:
    seconds(1, load.prompt, 1)
    return load.prompt / median(seconds(1, load.prompt, 1) for _ in range(load.requests))


def _static(seconds: Seconds, load: Load) -> float:
    seconds(load.together, load.prompt, 4)
    return load.requests * load.answer / seconds(load.together, load.prompt, load.answer)


_MEASURED: dict[str, Callable[[Seconds, Load], float]] = {
    "batch1": _batch1, "prefill": _prefill, "requests16": _static, "requests32": _static,
}  # fmt: skip

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
