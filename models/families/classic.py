"""Earlier decoders with a shape of their own: OPT, BLOOM, MPT, GPT-BigCode."""

from __future__ import annotations

from pagoda.models.checkpoint import Also, Drop, Rename, Rule
from pagoda.models.config import Config
from pagoda.models.families.common import (
    BART_LAYER,
    Heads,
    activation,
    attention_of,
    body_names,
    decoder,
    fused_layer,
    interleaved_qkv,
    plain_mlp,
    split,
)
from pagoda.models.family import Family
from pagoda.models.spec import Alibi, Attention, DecoderSpec, Embed, Layer, Learned, Mlp, Norm

UNBOUND = 2048
"""Sequence length of models whose positions set no limit and whose configuration gives none."""


def opt(config: Config) -> DecoderSpec:
    width, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    positions = config.integer("max_position_embeddings")
    config.require("do_layer_norm_before", True)
    config.require("word_embed_proj_dim", width, None)
    config.ignore("prefix", "output_projection")
    affine, bias = config.flag("layer_norm_elementwise_affine", default=True), config.flag("enable_bias", default=True)
    norm = Norm("layer", 1e-5, weight=affine, bias=affine)
    ff = plain_mlp(config.integer("ffn_dim"), activation(config, "activation_function"), bias)
    layer = Layer(Heads.each(heads, width).attention(bias=bias), ff, norm, ff_in=norm)
    last = None if config.flag("_remove_final_layer_norm", default=False) else norm
    embed = Embed(positions=Learned(positions + 2, offset=2))
    return decoder(config, width, (layer,) * config.integer("num_hidden_layers"), last, positions, tied=True, embed=embed)


def opt_rules(spec: DecoderSpec) -> tuple[Rule, ...]:
    at = "model.decoder"
    names = body_names(spec, f"{at}.embed_tokens", f"{at}.final_layer_norm", f"{at}.layers", BART_LAYER, f"{at}.embed_positions")
    return (Also("decoder.{x*}", "model.decoder.{x*}"), *names)


def bloom(config: Config) -> DecoderSpec:
    width, heads = config.integer("hidden_size", "n_embed"), config.integer("n_head", "num_attention_heads")
    config.require("apply_residual_connection_post_layernorm", False, None)
    config.ignore("slow_but_exact", "bias_dropout_fusion", "masked_softmax_fusion", "offset_alibi", "skip_bias_add", "skip_bias_add_qkv")
    config.ignore("attention_softmax_in_fp32", "n_embed")
    norm = Norm("layer", config.number("layer_norm_epsilon", default=1e-5), bias=True)
    layer = Layer(Heads.each(heads, width).attention(Alibi(), bias=True), plain_mlp(4 * width, "gelu_tanh"), norm, ff_in=norm)
    longest = config.integer("seq_length", "max_position_embeddings", default=UNBOUND)
    layers = (layer,) * config.integer("n_layer", "num_hidden_layers")
    return decoder(config, width, layers, norm, longest, tied=True, embed=Embed(norm=norm))


def bloom_rules(spec: DecoderSpec) -> tuple[Rule, ...]:
    return (
        *(Also(f"{x}.{{x*}}", f"transformer.{x}.{{x*}}") for x in ("word_embeddings", "word_embeddings_layernorm", "ln_f", "h")),
        Rename("transformer.word_embeddings_layernorm.{t}", "embed.norm.{t}"),
        *body_names(spec, "transformer.word_embeddings", "transformer.ln_f", "transformer.h", fused_layer("self_attention")),
        *interleaved_qkv(spec, "layers.{i}.self_attention.query_key_value"),
    )


def mpt(config: Config) -> DecoderSpec:
    width, heads = config.integer("d_model"), config.integer("n_heads")
    attn = config.child("attn_config") or Config({}, config.where)
    attn.require("alibi", True, default=True)
    attn.require("attn_type", "multihead_attention", default="multihead_attention")
    for name in ("qk_ln", "prefix_lm", "attn_uses_sequence_id"):
        attn.require(name, False, None)
    attn.ignore("attn_impl")
    config.require("no_bias", True, default=True)
    config.require("logit_scale", None, 1)
    config.ignore("learned_pos_emb", "embedding_fraction", "init_device", "init_config", "norm_type", "verbose")
    config.ignore("ffn_config", "emb_prob_drop")
    norm, dim = Norm("layer", config.number("layer_norm_epsilon", default=1e-5)), width // heads
    scale = attn.number("softmax_scale", default=dim**-0.5)
    position = Alibi(attn.number("alibi_bias_max", default=8.0))
    attention = Attention(heads, heads, dim, scale, position, clip=attn.number("clip_qkv", default=None))
    ff = Mlp(int(config.number("expansion_ratio", default=4)) * width, "gelu", gated=False)
    layers = (Layer(attention, ff, norm, ff_in=norm),) * config.integer("n_layers")
    return decoder(config, width, layers, norm, config.integer("max_seq_len", default=UNBOUND), tied=True)


def mpt_rules(spec: DecoderSpec) -> tuple[Rule, ...]:
    names = {"norm_1": "mixer_in", "norm_2": "ff_in", "attn.out_proj": "mixer.o", "ffn.up_proj": "ff.up", "ffn.down_proj": "ff.down"}
    return (
        *body_names(spec, "transformer.wte", "transformer.norm_f", "transformer.blocks", names),
        split("layers.{i}.attn.Wqkv", "layers.{i}.mixer", "qkv"),
    )


def bigcode(config: Config) -> DecoderSpec:
    width, heads, positions = config.integer("n_embd"), config.integer("n_head"), config.integer("n_positions")
    config.ignore(
        "attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "inference_runner", "num_key_value_heads",
        "pre_allocate_kv_cache", "max_batch_size", "max_sequence_length", "pad_key_length", "validate_runner_input",
    )  # fmt: skip
    norm, dim = Norm("layer", config.number("layer_norm_epsilon", default=1e-5), bias=True), width // heads
    kv_heads = 1 if config.flag("multi_query", default=True) else heads
    scale = dim**-0.5 if config.flag("scale_attn_weights", default=True) else 1.0
    attention = Attention(heads, kv_heads, dim, scale, qkv_bias=True, out_bias=True)
    ff = plain_mlp(config.integer("n_inner", default=4 * width), activation(config, "activation_function"))
    layers = (Layer(attention, ff, norm, ff_in=norm),) * config.integer("n_layer")
    return decoder(config, width, layers, norm, positions, tied=True, embed=Embed(positions=Learned(positions)))


def bigcode_rules(spec: DecoderSpec) -> tuple[Rule, ...]:
    names = {"ln_1": "mixer_in", "ln_2": "ff_in", "attn.c_proj": "mixer.o", "mlp.c_fc": "ff.up", "mlp.c_proj": "ff.down"}
    attention, fused = attention_of(spec), "layers.{i}.attn.c_attn"
    sizes = tuple(heads * attention.head_dim for heads in (attention.heads, attention.kv_heads, attention.kv_heads))
    one_kv = (split(fused, "layers.{i}.mixer", "qkv", sizes),)
    return (
        Drop("transformer.h.{i}.attn.bias"),
        *body_names(spec, "transformer.wte", "transformer.ln_f", "transformer.h", names, "transformer.wpe"),
        *(one_kv if attention.kv_heads == 1 else interleaved_qkv(spec, fused)),
    )


CLASSIC = (
    Family("opt", ("OPTForCausalLM",), ("opt",), opt, opt_rules),
    Family("bloom", ("BloomForCausalLM",), ("bloom",), bloom, bloom_rules),
    Family("mpt", ("MptForCausalLM", "MPTForCausalLM"), ("mpt",), mpt, mpt_rules),
    Family("gpt_bigcode", ("GPTBigCodeForCausalLM",), ("gpt_bigcode",), bigcode, bigcode_rules),
)
