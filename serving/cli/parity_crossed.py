"""Runs a checkpoint whose decoder attends to an encoder: its one recorded prompt through the engine, alone and beside others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from pagoda.serving.conformance.comparison import Terms
from pagoda.serving.engine.params import SamplingParams
from pagoda.serving.frontend.outputs import RequestOutput
from pagoda.serving.sdk import LLM

POOL_BYTES = 64 << 20
NAME = "seq2seq"

Reference = dict[str, torch.Tensor]


def is_crossed(reference: Reference) -> bool:
    """Whether the reference is of a model with an encoder."""
    return f"{NAME}.prompt" in reference


def run_crossed(path: Path, device: str, reference: Reference, terms: Terms, params: SamplingParams) -> list[RequestOutput]:
    """The answers to the same input twice at once, with others of other lengths between, and once more with all that is kept of it."""
    longest = len(reference[f"{NAME}.prompt"]) + len(reference[f"{NAME}.tokens"])
    pair = _pair(reference)
    with LLM(
        str(path), device=device, dtype=terms.dtype, max_model_len=longest, tensor_parallel_size=terms.ranks,
        kv_cache_memory_bytes=POOL_BYTES, skip_tokenizer_init=True,
    ) as llm:  # fmt: skip
        outputs = llm.generate([pair, *_others(pair), pair], params, use_tqdm=False)
        again = llm.generate([pair], params, use_tqdm=False)
    return [outputs[0], outputs[-1], *again]


def _pair(reference: Reference) -> dict[str, Any]:
    given = {name.removeprefix("inputs."): value for name, value in reference.items() if name.startswith("inputs.")}
    if "input_ids" in given:
        encoder: dict[str, Any] = {"prompt_token_ids": given["input_ids"][0].tolist()}
    else:
        encoder = {"multi_modal_data": {"audio": next(iter(given.values()))[0].numpy()}}
    return {"encoder_prompt": encoder, "decoder_prompt": {"prompt_token_ids": reference[f"{NAME}.prompt"].tolist()}}


def _others(pair: dict[str, Any]) -> list[dict[str, Any]]:
    ids = pair["encoder_prompt"].get("prompt_token_ids")
    return [] if ids is None else [{**pair, "encoder_prompt": {"prompt_token_ids": part}} for part in (ids[:5], ids[::-1], ids * 3)]
