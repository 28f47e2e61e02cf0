"""Output tokens a second of Pagoda and of transformers with static batches, in turns of one run: `python benchmarks/static_batches.py`.

The same requests (random prompt and output lengths) go to both, in bfloat16 on the CPU. transformers takes them in batches of
fixed size, pads prompts, and runs each batch to the maximum length that any request may ask for, as serving without paging and continuous
batching has to; only tokens that were asked for count. Prints one JSON line with medians, spreads and the ratio.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import time
from typing import NamedTuple

import torch
import transformers
from pagoda import LLM, SamplingParams
from pagoda.models.loading.reference import resolve
from pagoda.serving.engine.config import EngineConfig
from transformers import AutoModelForCausalLM, GgufConfig


class Job(NamedTuple):
    prompt: list[int]
    output: int


def jobs(count: int, max_prompt: int, max_output: int, seed: int) -> list[Job]:
    draw = random.Random(seed)
    lengths = [(draw.randint(8, max_prompt), min(max_output, 1 + int(draw.expovariate(4 / max_output)))) for _ in range(count)]
    return [Job(draw.choices(range(100, 40_000), k=prompt), output) for prompt, output in lengths]


def run_pagoda(llm: LLM, work: list[Job]) -> float:
    settings = [SamplingParams(temperature=0, max_tokens=job.output, ignore_eos=True, detokenize=False) for job in work]
    start = time.perf_counter()
    outputs = llm.generate([job.prompt for job in work], settings, use_tqdm=False)
    elapsed = time.perf_counter() - start
    assert [len(output.outputs[0].token_ids) for output in outputs] == [job.output for job in work]
    return elapsed


def run_static(model: torch.nn.Module, work: list[Job], batch: int, max_output: int) -> float:
    start = time.perf_counter()
    for first in range(0, len(work), batch):
        part = work[first : first + batch]
        width = max(len(job.prompt) for job in part)
        ids = torch.tensor([[0] * (width - len(job.prompt)) + job.prompt for job in part])
        mask = torch.tensor([[0] * (width - len(job.prompt)) + [1] * len(job.prompt) for job in part])
        with torch.inference_mode():
            model.generate(ids, attention_mask=mask, max_new_tokens=max_output, min_new_tokens=max_output, do_sample=False, pad_token_id=0)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--batch", type=int, default=8, help="static batch of transformers")
    parser.add_argument("--max-prompt", type=int, default=128)
    parser.add_argument("--max-output", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    path = resolve(EngineConfig().model)
    quantization = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.bfloat16, quantization_config=quantization)
    rates: dict[str, list[float]] = {"pagoda": [], "transformers": []}
    with LLM(dtype="bfloat16", max_num_seqs=options.requests, enable_prefix_caching=False, kv_cache_memory_bytes=1 << 30) as llm:
        run_pagoda(llm, jobs(2, 32, 8, seed=99))
        for turn in range(options.rounds):
            work = jobs(options.requests, options.max_prompt, options.max_output, seed=turn)
            tokens = sum(job.output for job in work)
            rates["pagoda"].append(tokens / run_pagoda(llm, work))
            rates["transformers"].append(tokens / run_static(model, work, options.batch, options.max_output))
    medians = {name: statistics.median(values) for name, values in rates.items()}
    print(json.dumps({
        **vars(options), "output_tok_s": rates, "ratio": round(medians["pagoda"] / medians["transformers"], 2),
        "torch": torch.__version__, "transformers": transformers.__version__, "machine": platform.processor() or platform.machine(),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
