"""Each family against transformers: a tiny random checkpoint, logits of every position, fed in two pieces beside another sequence."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pagoda.hal.errors import CheckpointError, PagodaError
from pagoda.models.checkpoint import apply, inverse
from pagoda.models.direct import DirectRun
from pagoda.models.load import describe, load_model, open_checkpoint
from pagoda.serving.conformance.comparison import Tolerance, compare_values
from pagoda.serving.engine.params import SamplingParams
from pagoda.serving.sdk import LLM
from safetensors.torch import load_file, save_file
from spec_samples import opened
from tiny_checkpoints import logits, make

DEVICE, TABLE = opened()
IDS = [(37 * i + 11) % 131 for i in range(40)]
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
LONG = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 3.0, 4.0],
    "original_max_position_embeddings": 32,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
GROUPED = {
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": 2, "n_group": 4, "topk_group": 2,
    "first_k_dense_replace": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.7,
}  # fmt: skip
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 12, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12, "num_key_value_heads": 4}
DEEP_YARN = {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7}
DIRECT = {**LATENT, "q_lora_rank": None, "attention_bias": True}
SPARSE = {**LATENT, **GROUPED}
CHOSEN = {**SPARSE, "index_topk": 8, "index_head_dim": 16, "index_n_heads": 8}
DELTA = {
    "num_hidden_layers": 4, "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}  # fmt: skip
KIMI = {
    "q_lora_rank": None, "linear_num_heads": 4, "linear_head_dim": 8, "num_experts": 4, "num_experts_per_token": 2,
    "moe_intermediate_size": 24, "layer_types": ["linear_attention", "full_attention"], "mlp_layer_types": ["dense", "sparse"],
    "routed_scaling_factor": 1.7,
}  # fmt: skip
STATES = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 6, "mamba_n_groups": 2, "mamba_chunk_size": 8}
GRANITE_HYBRID = {
    "layer_types": ["linear_attention", "full_attention"], "num_local_experts": 4, "num_experts_per_tok": 2, "residual_multiplier": 0.8,
    "shared_intermediate_size": 24, "embedding_multiplier": 1.5, "attention_multiplier": 0.3, "logits_scaling": 2.0,
    "position_embedding_type": "rope",
}  # fmt: skip
NEMOTRON = {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"], "mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2,
    "ssm_state_size": 6, "chunk_size": 8, "head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 20, "routed_scaling_factor": 1.7,
}  # fmt: skip
COHERE_MOE = {
    "num_hidden_layers": 4, "num_experts": 4, "num_experts_per_tok": 2, "sliding_window": 12, "head_dim": 8, "logit_scale": 0.3,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "mlp_layer_types": ["dense", "sparse", "dense", "sparse"], "prefix_dense_intermediate_size": 40,
}  # fmt: skip
MULTIPLIERS = {
    "attention_in_multiplier": 0.9, "attention_out_multiplier": 1.1, "key_multiplier": 0.8, "ssm_in_multiplier": 1.2,
    "ssm_out_multiplier": 0.7, "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7], "mlp_multipliers": [0.8, 1.3], "embedding_multiplier": 1.5,
    "lm_head_multiplier": 0.5,
}  # fmt: skip
MIXED = ["full_attention", "sliding_attention"]
GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}

ZAMBA = {
    "num_hidden_layers": 6, "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid", "hybrid", "linear_attention"],
    "mamba_d_state": 8, "n_mamba_heads": 4, "mamba_ngroups": 2, "num_key_value_heads": 4, "adapter_rank": 6, "hidden_act": "gelu",
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"rope_parameters": LLAMA3, "attention_bias": True, "mlp_bias": True, "head_dim": 16}),
    "mistral": ("Mistral", {"sliding_window": 9}),
    "qwen2": ("Qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1, "rope_parameters": YARN}),
    "qwen3": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "gemma": ("Gemma", {"head_dim": 16}),
    "gemma2": ("Gemma2", {"head_dim": 16, "sliding_window": 9, "query_pre_attn_scalar": 24}),
    "gemma3": ("Gemma3ForCausalLM", {"head_dim": 16, "sliding_window": 9, "num_hidden_layers": 6}),
    "smollm3": ("SmolLM3", {"no_rope_layer_interval": 2}),
    "phi3": ("Phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 32}),
    "gpt2": ("GPT2LMHeadModel", {**GPT, "scale_attn_by_inverse_layer_idx": True}),
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
    "qwen2_moe": ("Qwen2Moe", {**EXPERTS, "shared_expert_intermediate_size": 24, "norm_topk_prob": True, "mlp_only_layers": [0]}),
    "qwen3_moe": ("Qwen3Moe", {**EXPERTS, "head_dim": 16}),
    "gpt_oss": ("GptOss", {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 9}),
    "granite": ("Granite", {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2, "logits_scaling": 2.0}),
    "granitemoe": ("GraniteMoe", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "olmo": ("Olmo", {"clip_qkv": 0.5, "rope_theta": 500.0}),
    "olmo2": ("Olmo2", {}),
    "olmo3": ("Olmo3", {"sliding_window": 9, "num_hidden_layers": 4}),
    "olmoe": ("Olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "cohere": ("Cohere", {"use_qk_norm": True}),
    "cohere2": ("Cohere2", {"sliding_window": 9, "num_hidden_layers": 4, "head_dim": 16}),
    "stablelm": ("StableLm", {"qk_layernorm": True, "use_parallel_residual": True, "use_qkv_bias": True}),
    "starcoder2": ("Starcoder2", {"sliding_window": 9}),
    "phi": ("Phi", {}),
    "gpt_neox": ("GPTNeoX", {}),
    "gptj": ("GPTJ", {**GPT, "rotary_dim": 4}),
    "gpt_bigcode": ("GPTBigCode", GPT),
    "glm": ("Glm", {"head_dim": 16}),
    "glm4": ("Glm4", {"head_dim": 16}),
    "falcon": ("Falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon with one kv head": ("Falcon", {"bias": True}),
    "opt": ("OPT", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "bloom": ("Bloom", {"n_layer": 2, "n_head": 4}),
    "mpt": ("Mpt", {"d_model": 32, "n_heads": 4, "n_layers": 2}),
    "helium": ("Helium", {"head_dim": 8}),
    "arcee": ("Arcee", {}),
    "ernie": ("Ernie4_5", {"head_dim": 16, "use_bias": True}),
    "seed_oss": ("SeedOss", {"head_dim": 16, "attention_out_bias": True}),
    "nemotron": ("Nemotron", {"head_dim": 16}),
    "hunyuan": ("HunYuanDenseV1", {"head_dim": 16}),
    "exaone4": ("Exaone4", {"sliding_window": 9, "num_hidden_layers": 4}),
    "vaultgemma": ("VaultGemma", {"head_dim": 16, "sliding_window": 9}),
    "jais2": ("Jais2", {}),
    "hyperclovax": ("HyperCLOVAX", {"use_post_norm": True, "residual_multiplier": 0.5}),
    "flex_olmo": ("FlexOlmo", {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}),
    "glm4_moe": ("Glm4Moe", {**GROUPED, "head_dim": 16, "use_qk_norm": True, "attention_bias": True}),
    "dots1": ("Dots1", {**GROUPED, "head_dim": 16}),
    "solar_open": ("SolarOpen", {**GROUPED, "head_dim": 16}),
    "exaone_moe": ("ExaoneMoe", {**EXPERTS, "sliding_window": 9, "num_hidden_layers": 4, "num_shared_experts": 1}),
    "ernie_moe": ("Ernie4_5_Moe", {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24}),
    "hunyuan_moe": ("HunYuanMoEV1", {"head_dim": 16, "num_experts": 4, "moe_topk": 2}),
    "deepseek_v2": ("DeepseekV2", {**SPARSE, "norm_topk_prob": False, "topk_method": "group_limited_greedy", "rope_parameters": DEEP_YARN}),
    "deepseek_v2 with direct queries": ("DeepseekV2", {**SPARSE, **DIRECT, "norm_topk_prob": False, "topk_method": "greedy"}),
    "deepseek_v3": ("DeepseekV3", {**SPARSE, "rope_parameters": DEEP_YARN}),
    "deepseek_v3 turned by halves": ("DeepseekV3", {**SPARSE, **DIRECT, "rope_interleave": False}),
    "deepseek_v32": ("DeepseekV32", {**CHOSEN, "rope_parameters": DEEP_YARN}),
    "glm_moe_dsa": ("GlmMoeDsa", {**CHOSEN, "num_hidden_layers": 3, "indexer_types": ["full", "shared", "full"]}),
    "glm4_moe_lite": ("Glm4MoeLite", SPARSE),
    "axk1": ("AXK1", SPARSE),
    "youtu": ("Youtu", LATENT),
    "minicpm3": ("MiniCPM3", {**LATENT, "rope_parameters": LONG}),
    "gpt_neo": (
        "GPTNeo",
        {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 9, "intermediate_size": 48},
    ),
    "codegen": ("CodeGen", {**GPT, "rotary_dim": 4}),
    "persimmon": ("Persimmon", {}),
    "gpt_neox_japanese": ("GPTNeoXJapanese", {}),
    "biogpt": ("BioGpt", {}),
    "openai-gpt": ("OpenAIGPTLMHeadModel", {"n_embd": 32, "n_head": 4, "n_layer": 3, "n_positions": 64}),
    "xglm": ("XGLM", {"d_model": 32, "attention_heads": 4, "num_layers": 3, "ffn_dim": 48}),
    "nanochat": ("NanoChat", {"head_dim": 8}),
    "mellum": ("Mellum", {**EXPERTS, "head_dim": 16, "sliding_window": 9, "mlp_layer_types": ["dense", "sparse"], "layer_types": MIXED}),
    "hy_v3": ("HYV3", {**EXPERTS, "head_dim": 16, "num_shared_experts": 1, "router_scaling_factor": 1.7}),
    "aria_text": ("AriaText", {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 2, "head_dim": 16}),
    "granitemoeshared": ("GraniteMoeShared", {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 24}),
    "granite_swa": ("GraniteSWA", {"sliding_window": 9, "layer_types": MIXED, "layer_rope_theta": [0.0, 500.0]}),
    "granitemoe_swa": ("GraniteMoeSWA", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 9, "layer_types": MIXED}),
    "dbrx": (
        "Dbrx",
        {
            "d_model": 32,
            "n_heads": 4,
            "n_layers": 2,
            "max_seq_len": 128,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 0.5, "rope_theta": 500.0},
            "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32},
        },
    ),
    "phimoe": (  # within its original length: beyond, transformers keeps the short factors, which the model's own code does not
        "Phimoe",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "router_jitter_noise": 0.2,
            "attention_bias": True,
            "lm_head_bias": True,
            "rope_parameters": {**LONG, "short_mscale": 1.2, "long_mscale": 1.2, "original_max_position_embeddings": 64},
            "original_max_position_embeddings": 64,
        },
    ),
    "apertus": ("Apertus", {"rope_parameters": LLAMA3}),
    "ministral3": ("Ministral3", {"head_dim": 16, "rope_parameters": {**DEEP_YARN, "llama_4_scaling_beta": 0.1}}),
    "llama4": (
        "Llama4ForCausalLM",
        {
            "head_dim": 16,
            "num_local_experts": 4,
            "intermediate_size_mlp": 40,
            "attention_chunk_size": 9,
            "floor_scale": 8,
            "num_hidden_layers": 4,
            "no_rope_layer_interval": 2,
            "interleave_moe_layer_step": 2,
            "no_rope_layers": [1, 0, 1, 0],
        },
    ),
    "rwkv": ("Rwkv", {"attention_hidden_size": 48, "intermediate_size": 80, "rescale_every": 0}),
    "mamba": ("Mamba", {"state_size": 6, "time_step_rank": 3, "conv_kernel": 3, "use_bias": True}),
    "falcon_mamba": ("FalconMamba", {"state_size": 6, "time_step_rank": 3, "tie_word_embeddings": False}),
    "mamba2": ("Mamba2", {"state_size": 6, "num_heads": 8, "head_dim": 8, "n_groups": 2, "time_step_limit": [0.01, 0.9], "chunk_size": 8}),
    "jamba": (
        "Jamba",
        {"num_hidden_layers": 4, "attn_layer_period": 4, "attn_layer_offset": 1, "num_experts": 4, "mamba_d_state": 6, "mamba_dt_rank": 3},
    ),
    "lfm2": ("Lfm2", {"num_hidden_layers": 3, "full_attn_idxs": [1], "conv_L_cache": 4, "conv_bias": True, "block_multiple_of": 16}),
    "qwen3_next": ("Qwen3Next", {**EXPERTS, **DELTA, "shared_expert_intermediate_size": 20, "mlp_only_layers": [1]}),
    "qwen3_next_wide_values": ("Qwen3Next", {**EXPERTS, **DELTA, "linear_value_head_dim": 10, "attention_bias": True}),
    "qwen3_5": ("Qwen3_5", {**DELTA, "tie_word_embeddings": True}),
    "qwen3_5_moe": ("Qwen3_5Moe", {**EXPERTS, **DELTA, "shared_expert_intermediate_size": 20}),
    "olmo_hybrid": ("OlmoHybrid", {**{k: v for k, v in DELTA.items() if k != "head_dim"}, "linear_num_key_heads": 4}),
    "kimi_linear": ("KimiLinear", {**LATENT, **KIMI}),
    "lfm2_moe": ("Lfm2Moe", {**EXPERTS, "num_dense_layers": 1, "layer_types": ["conv", "full_attention"]}),
    "minimax": ("MiniMax", {"num_local_experts": 4, "num_experts_per_tok": 2, "mlp_alpha_factor": 1.3, "full_attn_beta_factor": 0.7}),
    "afmoe": (
        "Afmoe",
        {
            **EXPERTS,
            "num_hidden_layers": 4,
            "num_dense_layers": 1,
            "num_shared_experts": 2,
            "sliding_window": 12,
            "head_dim": 8,
            "mup_enabled": True,
            "route_scale": 1.7,
            "global_attn_every_n_layers": 3,
        },
    ),
    "cohere2_moe": ("Cohere2Moe", {**COHERE_MOE, "num_shared_experts": 2}),
    "cohere2_moe_sigmoid": (
        "Cohere2Moe",
        {
            **COHERE_MOE,
            "expert_selection_fn": "sigmoid",
            "num_shared_experts": 1,
            "shared_expert_combination_strategy": "sum",
            "rms_norm_eps": 1e-5,
        },
    ),
    "mimo_v2": (
        "MiMoV2Flash",
        {
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "sliding_window": 12,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "head_dim": 16,
            "v_head_dim": 12,
            "routed_scaling_factor": 1.7,
            "attention_bias": True,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 5e4, "partial_rotary_factor": 0.5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
            },
        },
    ),
    "bamba": ("Bamba", {**STATES, "attn_layer_indices": [1]}),
    "granite_hybrid": ("GraniteMoeHybrid", {**STATES, **GRANITE_HYBRID}),
    "nemotron_h": ("NemotronH", NEMOTRON),
    "falcon_h1": ("FalconH1", {**STATES, **MULTIPLIERS, "mamba_d_ssm": 64}),
    "falcon_h1_normed": ("FalconH1", {**STATES, "mamba_d_ssm": 64, "mamba_rms_norm": True, "mamba_norm_before_gate": False}),
    "minimax_m2": ("MiniMaxM2", {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "zamba2": ("Zamba2", ZAMBA),
    "zamba2_adapted": ("Zamba2", {**ZAMBA, "num_mem_blocks": 2, "use_shared_attention_adapter": True, "use_mem_rope": True}),
}


def run_in_pieces(folder: Path, cut: int) -> torch.Tensor:
    description = describe(open_checkpoint(folder), dtype="float32", table=TABLE)
    run = DirectRun(load_model(description, DEVICE, TABLE), DEVICE, 2, 64)
    first = run.step([(1, IDS[5:8]), (0, IDS[:cut])]).hidden[3:]
    second = run.step([(0, IDS[cut:]), (1, IDS[8:9])]).hidden[: len(IDS) - cut]
    return run.logits(torch.cat([first, second]))


@pytest.mark.parametrize("case", CASES)
def test_family_gives_the_logits_of_transformers(case: str, tmp_path: Path) -> None:
    name, values = CASES[case]
    want = logits(make(tmp_path, name, **values), IDS)
    # The angles of longrope follow the request's length at each step, so such a prompt must come in one.
    cut = 39 if values.get("rope_parameters", {}).get("rope_type") != "longrope" else 0
    got = run_in_pieces(tmp_path, cut) if cut else run_whole(tmp_path)
    finding = compare_values(case, got, want, Tolerance())
    assert finding.passed, finding


@pytest.mark.parametrize("case", CASES)
def test_turned_round_the_rules_give_the_names_and_numbers_on_disk(case: str, tmp_path: Path) -> None:
    name, values = CASES[case]
    make(tmp_path, name, **values)
    described = describe(open_checkpoint(tmp_path))
    disk = load_file(tmp_path / "model.safetensors")
    back = apply(inverse(described.family.rules(described.spec)), described.stored)
    assert {name for name in disk if not name.endswith(("slope_rate", "query_decay", "key_decay", "diagonal_decay"))} == set(back)
    for name, tensor in back.items():
        assert torch.equal(tensor.read(), disk[name]), name


def run_whole(folder: Path) -> torch.Tensor:
    run = DirectRun(load_model(describe(open_checkpoint(folder), dtype="float32", table=TABLE), DEVICE, TABLE), DEVICE, 1, 64)
    return run.logits(run.step([(0, IDS)]).hidden)


@pytest.mark.parametrize("case", ["llama", "qwen2", "gemma3", "phi3"])
def test_older_spelling_of_the_configuration_reads_the_same(case: str, tmp_path: Path) -> None:
    name, values = CASES[case]
    make(tmp_path, name, **values)
    newer = describe(open_checkpoint(tmp_path)).spec
    path = tmp_path / "config.json"
    path.write_text(json.dumps(older(json.loads(path.read_text()))))
    assert describe(open_checkpoint(tmp_path)).spec == newer


def older(config: dict[str, Any]) -> dict[str, Any]:
    rope = config.pop("rope_parameters")
    if "full_attention" in rope:
        config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
        del config["layer_types"]
        config["sliding_window_pattern"] = 6
    elif "layer_types" in config:
        del config["layer_types"]
    config["rope_theta"] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        config["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    config["rope_scaling"] = {"type": rope.pop("rope_type"), **rope} if rope["rope_type"] != "default" else None
    config["torch_dtype"] = config.pop("dtype")
    return config


HYBRIDS = (
    "mamba", "falcon_mamba", "mamba2", "jamba", "lfm2", "lfm2_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid", "kimi_linear",
    "minimax", "bamba", "granite_hybrid", "nemotron_h", "falcon_h1", "zamba2_adapted", "rwkv",
)  # fmt: skip


def greedy(model: torch.nn.Module, ids: list[int], count: int) -> list[int]:
    for _ in range(count):
        ids = [*ids, int(logits(model, ids)[-1].argmax())]
    return ids[-count:]


@pytest.mark.parametrize("case", [*HYBRIDS, "deepseek_v32", "glm_moe_dsa"])
def test_a_prefix_that_requests_share_is_found_again(case: str, tmp_path: Path) -> None:
    name, values = CASES[case]
    model = make(tmp_path, name, **values)
    prefix = [(37 * i + 11) % 120 + 5 for i in range(80)]
    prompts = [[*prefix, *end] for end in ([9, 17, 44], [60, 21], [9, 17, 45, 3])]
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    with LLM(
        str(tmp_path), device="cpu", dtype="float32", max_model_len=128, kv_cache_memory_bytes=16 << 20, skip_tokenizer_init=True
    ) as llm:
        outputs = [llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)[0] for ids in prompts]
    assert [list(output.outputs[0].token_ids) for output in outputs] == [greedy(model, ids, 4) for ids in prompts]
    assert outputs[0].num_cached_tokens == 0 and all(output.num_cached_tokens > 0 for output in outputs[1:])


SPARE: dict[str, tuple[str, ...]] = {
    "axk1": ("model.layers.0.mlp.post_mlp_layernorm.weight", "model.layers.2.eh_proj.weight"),
    "ernie_moe": ("model.mtp_block.0.mlp.up_proj.weight", "model.mtp_emb_norm.0.weight", "model.mtp_linear_proj.0.weight"),
    "exaone_moe": ("mtp.layers.0.self_attn.q_proj.weight", "mtp.fc.weight"),
    "glm4_moe": ("model.layers.2.eh_proj.weight",),
    "hy_v3": ("model.layers.2.eh_proj.weight",),
    "llama": ("model.layers.0.self_attn.rotary_emb.inv_freq",),
    "mellum": ("mtp.fc.weight",),
    "nemotron_h": ("mtp.layers.0.eh_proj.weight",),
    "olmo_hybrid": ("mtp.fc.weight",),
    "qwen3_next": ("mtp.fc.weight", "mtp.norm.weight"),
}


@pytest.mark.parametrize("case", SPARE)
def test_tensors_that_no_model_reads_are_passed_over_and_others_named(case: str, tmp_path: Path) -> None:
    """Those whose names transformers passes over as well."""
    name, values = CASES[case]
    make(tmp_path, name, **values)
    path = tmp_path / "model.safetensors"
    save_file({**load_file(path), **{spare: torch.ones(3) for spare in SPARE[case]}}, path, metadata={"format": "pt"})
    assert describe(open_checkpoint(tmp_path), dtype="float32").stored
    save_file({**load_file(path), "model.layers.0.mtpx.weight": torch.ones(3)}, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"1 unexpected: model\.layers\.0\.mtpx\.weight"):
        describe(open_checkpoint(tmp_path), dtype="float32")


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("case", ["qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_5_moe", "glm4_moe", "deepseek_v3", "olmoe"])
def test_experts_in_two_tensors_are_those_one_by_one(case: str, turned: bool, tmp_path: Path) -> None:
    """As transformers holds them, and the other way round, as Qwen3-VL's files do."""
    name, values = CASES[case]
    make(tmp_path, name, **values)
    path = tmp_path / "model.safetensors"
    tensors, listed = load_file(path), describe(open_checkpoint(tmp_path), dtype="float32").stored
    want = {key: stored.read() for key, stored in listed.items()}
    stems = sorted({key.partition(".experts.")[0] for key in tensors if ".experts.0." in key})
    assert stems
    for stem in stems:
        count = 1 + max(int(key.split(".experts.")[1].split(".")[0]) for key in tensors if key.startswith(f"{stem}.experts."))
        parts = {
            part: torch.stack([tensors.pop(f"{stem}.experts.{expert}.{part}_proj.weight") for expert in range(count)])
            for part in ("gate", "up", "down")
        }
        both = {"gate_up_proj": torch.cat([parts["gate"], parts["up"]], dim=1), "down_proj": parts["down"]}
        tensors |= {f"{stem}.experts.{part}": (t.mT if turned else t).contiguous() for part, t in both.items()}
    save_file(tensors, path, metadata={"format": "pt"})
    got = {key: stored.read() for key, stored in describe(open_checkpoint(tmp_path), dtype="float32").stored.items()}
    assert got.keys() == want.keys() and all(torch.equal(got[key], want[key]) for key in want)


@pytest.mark.parametrize(
    "case", ["qwen3_next", "qwen3_5", "bamba", "jamba", "mamba2", "lfm2", "kimi_linear", "nemotron_h", "falcon_h1", "zamba2"]
)
def test_layers_all_of_one_kind_are_read_or_refused_with_a_reason(case: str, tmp_path: Path) -> None:
    """Whatever a configuration says of them: never an error that says nothing, which an engine's start cannot tell either."""
    name, values = CASES[case]
    make(tmp_path, name, **values)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    lists = [key for key in ("layer_types", "layers_block_type", "attn_layer_indices", "full_attn_idxs") if key in config]
    for key in lists:
        for kind in dict.fromkeys(config[key]):
            path.write_text(json.dumps({**config, key: [kind] * len(config[key])}))
            with contextlib.suppress(PagodaError):
                assert describe(open_checkpoint(tmp_path), dtype="float32").stored
