"""What latent attention keeps in its pages: latents alone, or K and V of every head where adapters or int8 want it so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pagoda.hal.discovery import find
from pagoda.hal.kv import CacheKind, LayerCache
from pagoda.models.adapters.slots import LoraLimits
from pagoda.models.direct import DirectRun
from pagoda.models.load import describe, load_model, open_checkpoint
from pagoda.models.parallel.shard import Shard
from pagoda.ops.table import kernel_table
from pagoda.serving.engine.engine_plan import plan_engine
from tiny import tiny_config

CONFIG: dict[str, Any] = {
    "architectures": ["YoutuForCausalLM"], "model_type": "youtu", "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
    "hidden_act": "silu", "tie_word_embeddings": False, "kv_lora_rank": 16, "q_lora_rank": 12, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 12, "rope_theta": 10000.0,
}  # fmt: skip
PROMPT = [5, 3, 80, 22, 9, 41, 77, 5, 60, 31, 2, 17, 44, 8, 90, 11, 70, 29]
LORA = LoraLimits(1, 4)


def test_a_page_holds_latents_once_for_all_heads_on_every_rank() -> None:
    expected = LayerCache(CacheKind.LATENT, 1, 24, 0, "bfloat16")
    for shard in (Shard(), Shard(1, 2)):
        described = describe(CONFIG, dtype="bfloat16", shard=shard)
        assert described.facts.caches == (expected, expected)
        written = {facts for op, facts in described.uses if op == "write_kv"}
        assert {(facts.num_kv_heads, facts.head_dim, facts.v_dim) for facts in written} == {(1, 24, 0)}


def test_adapters_and_int8_keep_every_head() -> None:
    adapted = describe(CONFIG, dtype="bfloat16", lora=LORA).facts.caches[0]
    assert adapted == LayerCache(CacheKind.FULL, 4, 24, 12, "bfloat16")
    assert describe(CONFIG, dtype="bfloat16", kv_dtype="int8").facts.caches[0] == LayerCache(CacheKind.FULL, 4, 28, 16, "int8")


def test_the_plan_counts_what_pages_hold(tmp_path: Path) -> None:
    plan = plan_engine(tiny_config(tmp_path, CONFIG, dtype="float32"))
    [group] = plan.groups
    assert group.used_bytes == group.tokens_per_page * 2 * 24 * 4


def logits(folder: Path, device_name: str, **more: Any) -> torch.Tensor:
    device = find(device_name).open(0)
    table = kernel_table(find(device_name), device.info)
    model = load_model(describe(open_checkpoint(folder, "dummy"), dtype="float32", table=table, **more), device, table)
    run = DirectRun(model, device, 1, 64)
    run.step([(0, PROMPT[:7])])
    return run.logits(run.step([(0, PROMPT[7:])]).hidden)


@pytest.mark.parametrize("device", ["reference", "cpu"])
def test_both_forms_answer_alike(device: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    absorbed, expanded = logits(tmp_path, device), logits(tmp_path, device, lora=LORA)
    assert absorbed.std() > 0 and (absorbed - expanded).abs().max() < 1e-4 * absorbed.std()
    assert 0 < (logits(tmp_path, device, kv_dtype="int8") - absorbed).norm() < 0.1 * absorbed.norm()
