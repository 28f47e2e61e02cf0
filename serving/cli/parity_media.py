"""Runs a checkpoint whose reference holds a prompt with media through the engine, with the tensors that the reference was made of."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pagoda.serving.cli.parity_answers import engine_findings, greedy_params, logprobs_finding
from pagoda.serving.conformance.comparison import Finding, Terms
from pagoda.serving.sdk import LLM

PROMPTS, INPUTS = ("vlm", "seq2seq"), "inputs."

POOL_BYTES = 64 << 20

Reference = dict[str, torch.Tensor]


def is_media(reference: Reference, config: Mapping[str, Any]) -> bool:
    """Whether the reference is of a prompt with media among its tokens."""
    return "vlm.prompt" in reference or ("seq2seq.prompt" in reference and "audio_token_id" in config)


def check_media(path: Path, device: str, reference: Reference, terms: Terms) -> list[Finding]:
    """Twice: the second time embeddings, and pages where the prompt fills any, are there already."""
    asked = next(name for name in PROMPTS if f"{name}.prompt" in reference)
    ids = reference[f"{asked}.prompt"].tolist()
    tensors = {name.removeprefix(INPUTS): tensor for name, tensor in reference.items() if name.startswith(INPUTS)}
    prompt = {"prompt_token_ids": ids, "multi_modal_data": {"processed": tensors}}
    findings: list[Finding] = []
    with LLM(
        str(path),
        device=device,
        dtype=terms.dtype,
        max_model_len=len(ids) + len(reference[f"{asked}.tokens"]),
        tensor_parallel_size=terms.ranks,
        kv_cache_memory_bytes=POOL_BYTES,
        skip_tokenizer_init=True,
    ) as llm:
        for turn in ("engine", "again"):
            (output,) = llm.generate([prompt], greedy_params(reference, asked, turn == "engine"), use_tqdm=False)
            answer = output.outputs[0]
            findings += engine_findings(asked, list(answer.token_ids), answer.logprobs or [], reference, terms.tolerance, turn)
            if output.prompt_logprobs is not None:
                got = [row for row in output.prompt_logprobs if row is not None]
                findings.append(logprobs_finding(f"{asked}.prompt_logprobs", got, reference[f"{asked}.full_logits"], terms.tolerance))
    return findings
