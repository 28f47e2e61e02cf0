"""Models that run through transformers: what the bridge writes down of them, what it refuses, and that pages change no number."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from pagoda.hal.comm import Topology
from pagoda.hal.errors import CheckpointError, ConfigError, ModelError
from pagoda.hal.kv import CacheKind
from pagoda.models.adapters.slots import LoraLimits
from pagoda.models.bridge.masks import visible_of
from pagoda.models.bridge.model import BridgedAttention
from pagoda.models.bridge.spec import BridgeSpec, Visible
from pagoda.models.direct import DirectRun
from pagoda.models.load import Description, describe, load_model, open_checkpoint, support_of
from pagoda.models.parallel.shard import Shard
from pagoda.serving.conformance.comparison import Tolerance, compare_values
from safetensors.torch import load_file, save_file
from spec_samples import opened
from tiny_checkpoints import logits, make
from transformers.masking_utils import causal_mask_function, chunked_overlay, sliding_window_overlay

DEVICE, TABLE = opened()
IDS = [(37 * i + 11) % 131 for i in range(40)]
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 16}
AFMOE = {**EXPERTS, "num_hidden_layers": 4, "sliding_window": 8, "num_dense_layers": 1, "num_shared_experts": 1}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "afmoe": ("Afmoe", AFMOE),
    "bert": ("BertLMHeadModel", {"is_decoder": True}),
    "camembert": ("Camembert", {"is_decoder": True, "max_position_embeddings": 130}),
    "bitnet": ("BitNet", {}),
    "diffllama": ("DiffLlama", {}),
    "gpt_oss": ("GptOss", {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 9}),
    "gemma2": ("Gemma2", {"head_dim": 16, "sliding_window": 9, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 9.0}),
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def described(folder: Path, **options: Any) -> Description:
    return describe(open_checkpoint(folder), dtype="float32", table=TABLE, model_impl="transformers", **options)


@pytest.mark.parametrize("case", CASES)
def test_pages_change_no_number(case: str, tmp_path: Path) -> None:
    name, values = CASES[case]
    want = logits(make(tmp_path, name, **values), IDS)
    run = DirectRun(load_model(described(tmp_path), DEVICE, TABLE), DEVICE, 2, 64)
    first = run.step([(1, IDS[5:8]), (0, IDS[:27])]).hidden[3:]
    second = run.step([(0, IDS[27:]), (1, IDS[8:9])]).hidden[: len(IDS) - 27]
    finding = compare_values(case, run.logits(torch.cat([first, second])), want, Tolerance())
    assert finding.passed, finding


def test_what_attention_is_asked_becomes_data(tmp_path: Path) -> None:
    make(tmp_path, "Afmoe", **AFMOE)
    description = described(tmp_path)
    assert isinstance(description.spec, BridgeSpec) and description.family is None
    kinds = [(cache.kind, cache.window) for cache in description.facts.caches if cache is not None]
    assert kinds == [(CacheKind.SLIDING, 8)] * 3 + [(CacheKind.FULL, None)]
    assert {(call.heads, call.kv_heads, call.k_dim, call.scale) for call in description.spec.calls} == {(4, 2, 16, 0.25)}
    assert load_model(description, DEVICE, TABLE).loaded.nbytes == description.facts.weight_bytes


def test_families_come_first_unless_transformers_is_asked_for(tmp_path: Path) -> None:
    make(tmp_path, "Llama")
    config = open_checkpoint(tmp_path).config
    assert describe(config).family is not None and describe(config, model_impl="transformers").family is None
    assert [support_of(config), support_of({"model_type": "ctrl"}), support_of({"model_type": "abacus"})] == [
        "native",
        "bridge",
        "unsupported",
    ]
    with pytest.raises(ModelError, match=r"no model family serves model_type 'ctrl'"):
        describe({"model_type": "ctrl"}, model_impl="pagoda")
    with pytest.raises(ModelError, match=r"nor can transformers run it: .* has no model type 'abacus'"):
        describe({"model_type": "abacus"})


XGLM = {"d_model": 32, "attention_heads": 4, "num_layers": 2, "ffn_dim": 48}
TEXTS: dict[str, dict[str, Any]] = {
    "XGLM": XGLM,
    "OpenAIGPTLMHeadModel": {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64},
    "Zamba2": {"hybrid_layer_ids": [1], "layers_block_type": ["linear_attention", "hybrid"], "n_mamba_heads": 4, "mamba_d_state": 8,
               "mamba_ngroups": 1, "chunk_size": 8, "num_query_groups": 4, "kv_channels": 8},
}  # fmt: skip


@pytest.mark.parametrize("name", TEXTS)
def test_models_that_share_no_step_are_given_whole_texts(name: str, tmp_path: Path) -> None:
    """Two requests in turns, one of them in parts: what lies on pages is enough to make their texts again."""
    want = logits(make(tmp_path, name, **TEXTS[name]), IDS)
    description = described(tmp_path)
    assert isinstance(description.spec, BridgeSpec) and description.spec.way == "texts" and not description.facts.replayable
    run = DirectRun(load_model(description, DEVICE, TABLE), DEVICE, 2, 64)
    first = run.step([(1, IDS[5:8]), (0, IDS[:27])]).hidden[3:]
    second = run.step([(0, IDS[27:]), (1, IDS[8:9])]).hidden[: len(IDS) - 27]
    finding = compare_values(name, run.logits(torch.cat([first, second])), want, Tolerance())
    assert finding.passed, finding


@pytest.mark.parametrize("texts", [True, False])
def test_scorers_and_embedders_run_text_by_text(texts: bool, tmp_path: Path) -> None:
    kind = "AlbertModel" if texts else "AlbertForSequenceClassification"
    model = make(tmp_path, kind, embedding_size=16, num_labels=3)
    run = DirectRun(load_model(described(tmp_path), DEVICE, TABLE), DEVICE, 2, 64)
    hidden = run.step([(0, IDS[:9]), (1, IDS[9:30])]).hidden
    with torch.no_grad():
        answers = [model(torch.tensor([ids])) for ids in (IDS[:9], IDS[9:30])]
    want = [a.last_hidden_state[0] if texts else a.logits.expand(n, -1) for a, n in zip(answers, (9, 21), strict=True)]
    torch.testing.assert_close(run.model.pool(hidden), torch.cat(want), atol=1e-5, rtol=1e-5)


def test_models_that_look_ahead_are_run_as_they_are_and_it_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    want = logits(make(tmp_path, "BertLMHeadModel", is_decoder=False), IDS)
    run = DirectRun(load_model(described(tmp_path), DEVICE, TABLE), DEVICE, 1, 64)
    assert "is not causal" in caplog.text
    finding = compare_values("bert", run.logits(run.step([(0, IDS)]).hidden), want, Tolerance())
    assert finding.passed, finding


@pytest.mark.parametrize("name", ["Qwen2", "Gemma2"])
def test_two_ranks_by_the_modules_own_plan_equal_one(name: str, tmp_path: Path) -> None:
    """Two gloo ranks in threads of this process, each with half of the heads and of their pages."""
    want = logits(make(tmp_path, name, **CASES.get(name.lower(), (name, {}))[1]), IDS)
    address = f"127.0.0.1:{free_port()}"

    def rank(number: int) -> torch.Tensor:
        group = DEVICE.communicator(Topology(number, 2, address, "tp"))
        description = described(tmp_path, shard=Shard(number, 2))
        assert {call.heads for call in description.spec.calls} == {2}
        run = DirectRun(load_model(description, DEVICE, TABLE, group), DEVICE, 1, 64)
        parts = [run.step([(0, IDS[:27])]).hidden, run.step([(0, IDS[27:])]).hidden]
        group.close()
        return run.logits(torch.cat(parts))

    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(rank, range(2)))
    for answer in answers:
        finding = compare_values(name, answer, want, Tolerance())
        assert finding.passed, finding


def test_text_by_text_there_is_one_rank(tmp_path: Path) -> None:
    make(tmp_path, "XGLM", **XGLM)
    with pytest.raises(ConfigError, match="cannot be split over 2 ranks here"):
        described(tmp_path, shard=Shard(0, 2))


def test_what_is_not_there_yet_is_refused_by_name(tmp_path: Path) -> None:
    make(tmp_path, "BitNet")
    with pytest.raises(ConfigError, match=r"does not divide 2 num_key_value_heads"):
        described(tmp_path, shard=Shard(0, 4))
    with pytest.raises(ConfigError, match="no room for adapters"):
        described(tmp_path, lora=LoraLimits(1, 8))
    with pytest.raises(ConfigError, match="plain weights only"):
        described(tmp_path, quantization="fp8")


def test_missing_tensors_are_named(tmp_path: Path) -> None:
    make(tmp_path, "BitNet")
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lacks 1 tensors: model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(described(tmp_path), DEVICE, TABLE)


def test_a_model_that_would_be_served_wrong_does_not_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the interface does not say shows when a few tokens are compared with transformers' own attention."""
    make(tmp_path, "BitNet")
    right = BridgedAttention.__call__
    monkeypatch.setattr(BridgedAttention, "__call__", lambda self, q, *rest: right(self, q * 1.1, *rest))
    with pytest.raises(ModelError, match="apart from transformers' own attention"):
        load_model(described(tmp_path), DEVICE, TABLE)


def test_masks_are_known_by_what_they_let_see() -> None:
    def both(a: Any, b: Any) -> Any:
        return lambda *at: a(*at) & b(*at)

    causal = causal_mask_function
    assert visible_of(causal, "a") == Visible()
    for size in (1, 7, 4096):
        assert visible_of(both(causal, sliding_window_overlay(size)), "a") == Visible(window=size)
    for size in (2, 7, 4096):
        assert visible_of(both(causal, chunked_overlay(size, torch.zeros(1, dtype=torch.int64))), "a") == Visible(chunk=size)
    with pytest.raises(ModelError, match="neither causal, sliding nor chunked"):
        visible_of(lambda batch, head, query, key: key <= query + 3, "a")


def test_dummy_weights_need_no_checkpoint(tmp_path: Path) -> None:
    make(tmp_path, "Afmoe", **AFMOE)
    description = describe(open_checkpoint(tmp_path, "dummy"), dtype="float32", table=TABLE, model_impl="transformers")
    run = DirectRun(load_model(description, DEVICE, TABLE), DEVICE, 1, 64)
    assert run.logits(run.step([(0, IDS)]).hidden).isfinite().all()
