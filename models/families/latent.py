"""Decoders with multi-head latent attention: DeepSeek V2, V3 and V3.2, Kimi K2, GLM 4.7 Lite and 5, A.X K1, Youtu, MiniCPM 3."""

from __future__ import annotations

import math
from dataclasses import replace

from pagoda.hal.errors import ModelError
from pagoda.models.checkpoint import Drop, Rename, Rule
from pagoda.models.config import Config
from pagoda.models.families import llama
from pagoda.models.families.common import change_layers, plain_names, renamed, rms, rope, sparse
from pagoda.models.families.routed import deepseek, dense_layers, grouped, routed_rules
from pagoda.models.family import Family
from pagoda.models.rope import RopeStyle
from pagoda.models.spec import MLA, DecoderSpec, Embed, Index, Moe, Norm

LATENT_EPS = 1e-6
"""Of the norms of the latents, whatever the configuration says of the others."""


def deepseek_v2(config: Config) -> DecoderSpec:
    """The first one with latent attention, and experts that may be chosen in groups."""
    config.require("norm_topk_prob", False, default=False)
    config.require("topk_method", "greedy", "group_limited_greedy", default="greedy")
    groups = config.integer("n_group", default=1), config.integer("topk_group", default=1)
    limited = config.text("topk_method", default="greedy") == "group_limited_greedy"
    return latent(config, deepseek(config, *(groups if limited else ())))


def deepseek_v3(config: Config) -> DecoderSpec:
    plain = llama.spec(config)
    config.require("moe_layer_freq", 1, default=1)
    config.require("scoring_func", "sigmoid", default="sigmoid")
    config.require("topk_method", "noaux_tc", default="noaux_tc")
    config.ignore("ep_size")
    dense = dense_layers(config, len(plain.layers), config.integer("first_k_dense_replace", default=0))
    return latent(config, sparse(plain, grouped(config, plain), dense))


def deepseek_v32(config: Config) -> DecoderSpec:
    """V3 whose queries see chosen keys; the heads that choose turn in halves."""
    return _indexed(config, ("full",) * config.integer("num_hidden_layers"), "neox")


def glm_dsa(config: Config) -> DecoderSpec:
    """The same with pairs, and with layers that see what the last one before them chose."""
    every, first = config.integer("index_topk_freq", default=1), config.integer("index_skip_topk_offset", default=2)
    pattern, count = config.values.get("index_topk_pattern"), config.integer("num_hidden_layers")
    kinds = tuple("shared" if max(i - first + 1, 0) % max(every, 1) else "full" for i in range(count))
    if pattern is not None:
        kinds = tuple({"F": "full", "S": "shared"}.get(letter, letter) for letter in pattern)
    config.ignore("index_topk_pattern")
    return _indexed(config, config.list("indexer_types", kind=str, default=kinds), "interleaved")


def _indexed(config: Config, kinds: tuple[str, ...], style: RopeStyle) -> DecoderSpec:
    """`kinds`: of each layer, "full" with heads that choose or "shared" without."""
    plain = deepseek_v3(config.having({"layer_types": None}))
    config.ignore("layer_types", "indexer_types", "indexer_rope_interleave")
    index = Index(config.integer("index_n_heads"), config.integer("index_head_dim"), config.integer("index_topk"), style)
    if len(kinds) != len(plain.layers) or kinds[0] != "full" or set(kinds) - {"full", "shared"}:
        raise ModelError(
            f"{config.where}: indexer_types must name full or shared for each of {len(plain.layers)} layers, the first one full"
        )
    layers = []
    for layer, kind in zip(plain.layers, kinds, strict=True):
        assert isinstance(layer.mixer, MLA)
        layers.append(replace(layer, mixer=replace(layer.mixer, index=replace(index, own=kind == "full"))))
    return replace(plain, layers=tuple(layers))


def axk1(config: Config) -> DecoderSpec:
    """Sparse layers norm what their experts give."""
    plain = deepseek_v3(config)
    norm = rms(config)
    layers = (replace(layer, ff_out=norm) if isinstance(layer.feed_forward, Moe) else layer for layer in plain.layers)
    return replace(plain, layers=tuple(layers))


def youtu(config: Config) -> DecoderSpec:
    plain = latent(config, llama.spec(config))
    config.ignore("embedding_initializer_range")
    return replace(plain, head=replace(plain.head, tied=config.flag("tie_word_embeddings", default=True)))


def minicpm3(config: Config) -> DecoderSpec:
    plain = latent(config, llama.spec(config), "neox")
    scale = config.number("scale_depth", default=1.4) / math.sqrt(len(plain.layers))
    base = config.integer("dim_model_base", default=256)
    head = replace(plain.head, tied=config.flag("tie_word_embeddings", default=True), scale=base / plain.width)
    layers = tuple(replace(layer, scale=scale) for layer in plain.layers)
    return replace(plain, layers=layers, head=head, embed=Embed(scale=config.number("scale_emb", default=12.0)))


def latent(config: Config, plain: DecoderSpec, style: RopeStyle = "interleaved") -> DecoderSpec:
    """The spec with latent attention in every layer."""
    mla = mla_of(config, plain.width, style)
    return change_layers(plain, lambda _, layer, __: replace(layer, mixer=mla))


def mla_of(config: Config, width: int, style: RopeStyle = "interleaved") -> MLA:
    config.ignore("qk_head_dim", "head_dim")
    if not config.flag("rope_interleave", default=True):
        style = "neox"
    heads = config.integer("num_attention_heads")
    nope, turned = config.integer("qk_nope_head_dim"), config.integer("qk_rope_head_dim")
    bias = config.flag("attention_bias", default=False)
    return MLA(
        heads,
        config.integer("q_lora_rank", default=None),
        config.integer("kv_lora_rank"),
        nope,
        turned,
        config.integer("v_head_dim", default=width // heads),
        (nope + turned) ** -0.5 * _stretch(config),
        rope(config, turned, style),
        Norm("rms", LATENT_EPS),
        down_bias=bias,
        out_bias=bias,
    )


def _stretch(config: Config) -> float:
    """Stretched ropes sharpen the logits by the square of YaRN's factor where `mscale_all_dim` is given."""
    values = config.child("rope_parameters") or config.child("rope_scaling")
    if values is None or values.values.get("rope_type", values.values.get("type", "default")) == "default":
        return 1.0
    by = values.number("mscale_all_dim", default=0.0)
    factor = values.number("factor", default=1.0)
    return (0.1 * by * math.log(factor) + 1.0) ** 2 if by and factor > 1 else 1.0


def latent_names(spec: DecoderSpec) -> tuple[Rule, ...]:
    names = {
        "self_attn.kv_a_proj_with_mqa": "mixer.kv_down", "self_attn.kv_a_layernorm": "mixer.kv_norm", "mixer.kv_b": "mixer.kv",
    }  # fmt: skip
    if any(isinstance(layer.mixer, MLA) and layer.mixer.q_rank for layer in spec.layers):
        names |= {"mixer.q_a": "mixer.q_down", "self_attn.q_a_layernorm": "mixer.q_norm", "mixer.q_b": "mixer.q"}
    return renamed(names)


def _indexed_names(spec: DecoderSpec) -> tuple[Rule, ...]:
    names = {"wq_b": "index_q", "wk": "index_k", "weights_proj": "index_weights", "k_norm": "index_norm"}
    return (*_sparse_names(spec), *renamed(names, "layers.{i}.self_attn.indexer", "layers.{i}.mixer"))


def _sparse_names(spec: DecoderSpec) -> tuple[Rule, ...]:
    return (*routed_rules(spec), *latent_names(spec))


def _axk1_names(spec: DecoderSpec) -> tuple[Rule, ...]:
    unread = Drop("model.layers.{i}.mlp.post_mlp_layernorm.{t}")
    return (unread, *_sparse_names(spec), Rename("layers.{i}.post_mlp_layernorm.{t}", "layers.{i}.ff_out.{t}"))


def _dense_names(spec: DecoderSpec) -> tuple[Rule, ...]:
    return (*plain_names(spec), *latent_names(spec))


LATENT = (
    Family("deepseek_v2", ("DeepseekV2ForCausalLM",), ("deepseek_v2",), deepseek_v2, _sparse_names),
    Family("deepseek_v3", ("DeepseekV3ForCausalLM",), ("deepseek_v3", "kimi_k2"), deepseek_v3, _sparse_names),
    Family("deepseek_v32", ("DeepseekV32ForCausalLM",), ("deepseek_v32",), deepseek_v32, _indexed_names),
    Family("glm_moe_dsa", ("GlmMoeDsaForCausalLM",), ("glm_moe_dsa",), glm_dsa, _indexed_names),
    Family("glm4_moe_lite", ("Glm4MoeLiteForCausalLM",), ("glm4_moe_lite",), deepseek_v3, _sparse_names),
    Family("axk1", ("AXK1ForCausalLM",), ("axk1",), axk1, _axk1_names),
    Family("youtu", ("YoutuForCausalLM",), ("youtu",), youtu, _dense_names),
    Family("minicpm3", ("MiniCPM3ForCausalLM",), ("minicpm3",), minicpm3, _dense_names),
)
