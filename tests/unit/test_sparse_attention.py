"""Attention over chosen keys: what pages hold, that the choice counts beyond its size alone, ranks, and what it does not go with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pagoda.hal.discovery import find
from pagoda.hal.errors import ConfigError, ModelError
from pagoda.hal.kv import CacheKind, LayerCache
from pagoda.models.adapters.slots import LoraLimits
from pagoda.models.direct import DirectRun
from pagoda.models.load import describe, load_model, open_checkpoint
from pagoda.models.parallel.shard import Shard
from pagoda.ops.table import kernel_table

CONFIG: dict[str, Any] = {
    "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
    "hidden_act": "silu", "tie_word_embeddings": False, "kv_lora_rank": 16, "q_lora_rank": 12, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 12, "rope_theta": 10000.0, "first_k_dense_replace": 3, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 1, "index_topk": 6, "index_head_dim": 16,
    "index_n_heads": 8, "indexer_types": ["full", "shared", "full"],
}  # fmt: skip
PROMPT = [5, 3, 80, 22, 9, 41, 77, 5, 60, 31, 2, 17, 44, 8, 90, 11, 70, 29]


def hidden(folder: Path, config: dict[str, Any], pieces: tuple[int, ...] = (len(PROMPT),)) -> torch.Tensor:
    """Of every token of the prompt, run in pieces."""
    (folder / "config.json").write_text(json.dumps(config))
    device = find("cpu").open(0)
    table = kernel_table(find("cpu"), device.info)
    run = DirectRun(load_model(describe(open_checkpoint(folder, "dummy"), dtype="float32", table=table), device, table), device, 1, 64)
    parts, at = [], 0
    for piece in pieces:
        parts.append(run.step([(0, PROMPT[at : at + piece])]).hidden)
        at += piece
    return torch.cat(parts)


def test_pages_hold_the_small_heads_key_beside_the_latent_on_every_rank() -> None:
    own, shared = (LayerCache(CacheKind.LATENT, 1, 24, dim, "bfloat16") for dim in (16, 0))
    for shard in (Shard(), Shard(1, 2)):
        described = describe(CONFIG, dtype="bfloat16", shard=shard)
        assert described.facts.caches == (own, shared, own)
        assert {"choose_keys", "sparse_attention", "paged_attention"} <= {op for op, _ in described.uses}


def test_the_choice_counts_beyond_its_size_alone(tmp_path: Path) -> None:
    some, all_ = (hidden(tmp_path, {**CONFIG, "index_topk": size}) for size in (6, 64))
    torch.testing.assert_close(some[:6], all_[:6], rtol=0, atol=1e-5)
    assert (some[7:] - all_[7:]).abs().max() > 1e-2


def test_pieces_give_what_the_whole_gives(tmp_path: Path) -> None:
    torch.testing.assert_close(hidden(tmp_path, CONFIG, (4, 9, 1, 1, 3)), hidden(tmp_path, CONFIG), rtol=0, atol=1e-5)


def test_what_it_does_not_go_with_is_said() -> None:
    with pytest.raises(ConfigError, match="int8"):
        describe(CONFIG, kv_dtype="int8")
    with pytest.raises(ConfigError, match="adapters"):
        describe(CONFIG, lora=LoraLimits(1, 4))
    with pytest.raises(ModelError, match="indexer_types"):
        describe({**CONFIG, "indexer_types": ["shared", "full", "full"]})


@pytest.mark.parametrize(
    ("given", "kinds"),
    [
        ({"index_topk_pattern": "FSF"}, [True, False, True]),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 1}, [True, False, True]),
        ({}, [True, True, True]),
    ],
)
def test_which_layers_choose_is_read_in_every_spelling(given: dict[str, Any], kinds: list[bool]) -> None:
    config = {key: value for key, value in CONFIG.items() if key != "indexer_types"}
    assert [cache.v_dim > 0 for cache in describe({**config, **given}).facts.caches if cache is not None] == kinds
