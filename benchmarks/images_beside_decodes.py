"""What images do to those who read text: gaps between tokens of eight answers, without images and while requests with several arrive.

    python benchmarks/images_beside_decodes.py [--images 4] [--every 0.75] [--seconds 20] [--model-impl auto] [--output FILE]

A random model that sees (a CLIP tower of 10.6 M weights, 256 patches an image; a small Llama) runs on the CPU in this process. Eight
requests write; every so many seconds one comes whose prompt has several new images, and is answered with a token. Pixels are made
beforehand, so it is the encoder and the prompts that stand between two tokens. Printed: gaps (p50, p99, largest) in both phases, and
what a request with one image takes alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import tempfile
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from pagoda.serving.engine.params import SamplingParams
from pagoda.serving.sdk import AsyncLLM

IMAGE, PATCHES, TEXTS = 5, 256, 8
TEXT = {"model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 4, "vocab_size": 1024, "max_position_embeddings": 4096}  # fmt: skip
VISION = {"model_type": "clip_vision_model", "hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 6,
          "num_attention_heads": 6, "image_size": 224, "patch_size": 14}  # fmt: skip


def make(folder: str) -> None:
    """Save the model."""
    torch.manual_seed(0)
    config = transformers.LlavaConfig(image_token_id=IMAGE, text_config=TEXT, vision_config=VISION)
    transformers.LlavaForConditionalGeneration(config).save_pretrained(folder)


def seeing(images: int, seed: int) -> dict[str, Any]:
    """A prompt with so many new images."""
    pixels = torch.randn(images, 3, 224, 224, generator=torch.Generator().manual_seed(seed))
    ids = [token for _ in range(images) for token in (20, *[IMAGE] * PATCHES)]
    return {"prompt_token_ids": [*ids, 21], "multi_modal_data": {"processed": {"pixel_values": pixels}}}


async def write(llm: AsyncLLM, seed: int, until: float) -> list[float]:
    """When the tokens of one answer came."""
    came: list[float] = []
    params = SamplingParams(temperature=0, max_tokens=3900, ignore_eos=True)
    async for _ in llm.generate({"prompt_token_ids": [30 + seed, *range(40, 70)]}, params):
        came.append(time.perf_counter())
        if came[-1] > until:
            break
    return came


async def look(llm: AsyncLLM, prompts: Sequence[dict[str, Any]], every: float, until: float) -> int:
    """Send a prompt with images every so many seconds; how many were sent."""
    sent: list[asyncio.Task[None]] = []
    begin = time.perf_counter()
    for number in count():
        at = begin + (number + 0.5) * every
        if at > until - every:
            break
        await asyncio.sleep(max(at - time.perf_counter(), 0.0))
        sent.append(asyncio.create_task(answer(llm, prompts[number % len(prompts)])))
    await asyncio.gather(*sent)
    return len(sent)


async def answer(llm: AsyncLLM, prompt: dict[str, Any]) -> None:
    async for _ in llm.generate(prompt, SamplingParams(temperature=0, max_tokens=1)):
        pass


async def phase(llm: AsyncLLM, seconds: float, prompts: Sequence[dict[str, Any]], every: float) -> dict[str, Any]:
    """Gaps in milliseconds while so many prompts with images arrive."""
    until = time.perf_counter() + seconds
    looking = look(llm, prompts, every, until) if prompts else asyncio.sleep(0, 0)
    *times, sent = await asyncio.gather(*(write(llm, seed, until) for seed in range(TEXTS)), looking)
    gaps = np.concatenate([np.diff(one[2:]) for one in times]) * 1e3
    p50, p99 = np.percentile(gaps, (50, 99)).tolist()
    found = {"p50": p50, "p99": p99, "largest": float(gaps.max())}
    return {"requests_with_images": sent, "tokens": len(gaps), **{f"gap_ms_{name}": round(value, 2) for name, value in found.items()}}


async def measure(folder: str, images: int, every: float, seconds: float, model_impl: str) -> dict[str, Any]:
    prompts = [seeing(images, 1000 + number) for number in range(int(seconds / every) + 1)]
    async with AsyncLLM(folder, device="cpu", dtype="float32", max_model_len=4096, kv_cache_memory_bytes=512 << 20,
                        skip_tokenizer_init=True, model_impl=model_impl) as llm:  # fmt: skip
        await phase(llm, 2.0, [seeing(images, 1)], 0.5)
        alone = []
        for seed in range(2, 7):
            begin = time.perf_counter()
            await answer(llm, seeing(1, seed))
            alone.append((time.perf_counter() - begin) * 1e3)
        quiet = await phase(llm, seconds, (), every)
        return {"one_image_alone_ms": round(sorted(alone)[2], 1), "without": quiet, "with": await phase(llm, seconds, prompts, every)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=4, help="in a prompt")
    parser.add_argument("--every", type=float, default=0.75, help="seconds between prompts with images")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each phase")
    parser.add_argument("--model-impl", default="auto", help="auto: the language model is native; transformers: the module's")
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make(folder)
        result = asyncio.run(measure(folder, asked.images, asked.every, asked.seconds, asked.model_impl))
    where = {"machine": platform.machine(), "threads": torch.get_num_threads(), "torch": torch.__version__, "images": asked.images,
             "every_s": asked.every, "seconds": asked.seconds, "model_impl": asked.model_impl}  # fmt: skip
    text = json.dumps({**where, **result}, indent=1)
    print(text)
    if asked.output is not None:
        asked.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
