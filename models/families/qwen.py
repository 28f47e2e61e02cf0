"""Qwen 2 (biases on q, k, v) and Qwen 3 (norms of q and k per head); with routed experts, in 2 with a gated shared one."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from pagoda.models.config import Config
from pagoda.models.families import llama
from pagoda.models.families.common import (
    change_layers,
    experts_of,
    mlp_of,
    plain_names,
    rms,
    sparse,
    sparse_names,
    windows,
    with_attention,
    woven,
)
from pagoda.models.family import Family
from pagoda.models.spec import DecoderSpec, QkNorm, Router, Window


def qwen2(config: Config) -> DecoderSpec:
    return with_attention(_windowed(config), qkv_bias=True, out_bias=False)


def qwen3(config: Config) -> DecoderSpec:
    return with_attention(_windowed(config), qk_norm=QkNorm(rms(config)))


def _windowed(config: Config) -> DecoderSpec:
    seen = qwen_windows(config)
    return change_layers(llama.spec(config), lambda i, layer, attention: replace(layer, mixer=replace(attention, window=seen[i])))


def qwen_windows(config: Config) -> tuple[Window | None, ...]:
    """`sliding_window` counts only with `use_sliding_window`, and then from layer `max_window_layers` on."""
    layers, first = config.integer("num_hidden_layers"), config.integer("max_window_layers", default=0)
    size = config.integer("sliding_window", default=None)
    size = size if config.flag("use_sliding_window", default=False) else None
    if config.has("layer_types"):
        return windows(config, layers, size)
    return tuple(Window("sliding", size) if size and i >= first else None for i in range(layers))


def qwen2_moe(config: Config) -> DecoderSpec:
    plain = with_attention(qwen2(config), qkv_bias=config.flag("qkv_bias", default=True))
    return _with_experts(config, plain, config.integer("shared_expert_intermediate_size"))


def qwen3_moe(config: Config) -> DecoderSpec:
    return _with_experts(config, qwen3(config), None)


def _with_experts(config: Config, plain: DecoderSpec, shared: int | None) -> DecoderSpec:
    router, hidden = Router("softmax", config.flag("norm_topk_prob", default=False)), config.integer("moe_intermediate_size")
    beside, count = replace(mlp_of(plain), hidden=shared) if shared else None, len(plain.layers)
    moe = replace(experts_of(config, plain, router, hidden, beside), shared_gate=shared is not None)
    dense, step = config.list("mlp_only_layers", kind=int, default=()), config.integer("decoder_sparse_step", default=1)
    return sparse(plain, moe, {i for i in range(count) if i in dense or (i + 1) % step})


def qwen3_vl_moe(config: Config) -> DecoderSpec:
    renormalised = config.flag("norm_topk_prob", default=True)
    return woven(qwen3_moe(config.having({"norm_topk_prob": renormalised})), SECTIONS)


SECTIONS = (24, 20, 20)
QWEN2_TEXTS = ("qwen2", "qwen2_vl_text", "qwen2_5_vl_text", "qwen2_5_omni_text")
QWEN2 = Family("qwen2", ("Qwen2ForCausalLM",), QWEN2_TEXTS, qwen2, plain_names)
QWEN3 = Family("qwen3", ("Qwen3ForCausalLM",), ("qwen3",), qwen3, plain_names)
QWEN3_VL = Family("qwen3_vl", (), ("qwen3_vl_text",), lambda config: woven(qwen3(config), SECTIONS), plain_names)
QWEN2_MOE = Family("qwen2_moe", ("Qwen2MoeForCausalLM",), ("qwen2_moe",), qwen2_moe, partial(sparse_names, shared="shared_expert"))
QWEN3_MOE = Family("qwen3_moe", ("Qwen3MoeForCausalLM",), ("qwen3_moe",), qwen3_moe, sparse_names)
QWEN3_VL_MOE = Family("qwen3_vl_moe", (), ("qwen3_vl_moe_text", "qwen3_omni_moe_text"), qwen3_vl_moe, sparse_names)
