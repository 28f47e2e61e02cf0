"""Runs a checkpoint whose reference holds hidden states or scores through the engine, alone and together, as `LLM.encode` does."""

from __future__ import annotations

from pathlib import Path

import torch
from pagoda.serving.conformance.comparison import Finding, Terms, compare_values
from pagoda.serving.engine.pooling import PoolingParams
from pagoda.serving.sdk import LLM

POOL_BYTES = 64 << 20

Reference = dict[str, torch.Tensor]


def is_pooled(reference: Reference) -> bool:
    """Whether the reference is of a model that answers with vectors or scores."""
    return any(name.endswith((".hidden", ".scores")) for name in reference)


def check_pooled(path: Path, device: str, reference: Reference, turns: list[list[str]], terms: Terms) -> list[Finding]:
    """Of vectors: each token's state, their mean, and the mean with length 1; of scores: those before any activation."""
    vectors = any(name.endswith(".hidden") for name in reference)
    longest = max(len(reference[f"{name}.prompt"]) for names in turns for name in names)
    config = {"pooling_type": "MEAN", "normalize": True} if vectors else None
    findings: list[Finding] = []
    with LLM(
        str(path),
        device=device,
        dtype=terms.dtype,
        runner="pooling",
        pooler_config=config,
        max_model_len=longest,
        tensor_parallel_size=terms.ranks,
        kv_cache_memory_bytes=POOL_BYTES,
        skip_tokenizer_init=True,
    ) as llm:
        for names in turns:
            prompts = [reference[f"{name}.prompt"].tolist() for name in names]
            for suffix, params in _asked(vectors).items():
                outputs = llm.encode(prompts, params, use_tqdm=False)
                for name, output in zip(names, outputs, strict=True):
                    got = torch.from_numpy(output.outputs.data.copy())
                    findings.append(compare_values(f"{name}.{suffix}", got, reference[f"{name}.{suffix}"], terms.tolerance))
    return findings


def _asked(vectors: bool) -> dict[str, PoolingParams]:
    raw = PoolingParams(use_activation=False)
    if not vectors:
        return {"scores": raw}
    return {"hidden": PoolingParams("token_embed", use_activation=False), "mean": raw, "mean.normalized": PoolingParams()}
