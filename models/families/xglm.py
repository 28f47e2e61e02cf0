"""XGLM: GPT 2's layers in BART's words, with sines for positions."""

from __future__ import annotations

from pagoda.models.checkpoint import Drop, Rename, Rule
from pagoda.models.config import Config
from pagoda.models.families.common import activation
from pagoda.models.family import Family
from pagoda.models.spec import Attention, DecoderSpec, Embed, Head, Layer, Mlp, Norm, Sinusoids


def spec(config: Config) -> DecoderSpec:
    config.ignore("layerdrop", "activation_dropout", "init_std", "decoder_start_token_id")
    config.require("add_cross_attention", False, default=False)
    width, heads, positions = config.integer("d_model"), config.integer("attention_heads"), config.integer("max_position_embeddings")
    norm, dim = Norm("layer", 1e-5, bias=True), width // heads
    attention = Attention(heads, heads, dim, dim**-0.5, qkv_bias=True, out_bias=True)
    ff = Mlp(config.integer("ffn_dim"), activation(config, "activation_function"), gated=False, up_bias=True, down_bias=True)
    return DecoderSpec(
        vocab=config.integer("vocab_size"),
        width=width,
        layers=(Layer(attention, ff, norm, ff_in=norm),) * config.integer("num_layers"),
        norm=norm,
        embed=Embed(
            scale=width**0.5 if config.flag("scale_embedding", default=True) else 1.0,
            positions=Sinusoids(positions + 2, offset=2, reaching=True),
        ),
        head=Head(tied=config.flag("tie_word_embeddings", default=True)),
        max_positions=positions,
    )


def rules(made: DecoderSpec) -> tuple[Rule, ...]:
    names = {
        "self_attn_layer_norm": "mixer_in", "final_layer_norm": "ff_in", "fc1": "ff.up", "fc2": "ff.down", "self_attn.out_proj": "mixer.o",
        **{f"self_attn.{p}_proj": f"mixer.{p}" for p in "qkv"},
    }  # fmt: skip
    return (
        Drop("model.embed_positions.weights"),
        *((Drop("lm_head.weight"),) if made.head.tied else (Rename("lm_head.{t}", "head.{t}"),)),
        Rename("model.embed_tokens.{t}", "embed.{t}"),
        Rename("model.layer_norm.{t}", "norm.{t}"),
        *(Rename(f"model.layers.{{i}}.{theirs}.{{t}}", f"layers.{{i}}.{ours}.{{t}}") for theirs, ours in names.items()),
    )


XGLM = Family("xglm", ("XGLMForCausalLM",), ("xglm",), spec, rules)
