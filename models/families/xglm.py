"""XGLM: GPT 2's layers in BART's words, with sines for positions."""

from __future__ import annotations

from pagoda.models.checkpoint import Drop, Rename, Rule
from pagoda.models.config import Config
from pagoda.models.families.common import Heads, activation, decoder, head_names, plain_mlp, renamed
from pagoda.models.family import Family
from pagoda.models.spec import DecoderSpec, Embed, Layer, Norm, Sinusoids


def spec(config: Config) -> DecoderSpec:
    config.require("add_cross_attention", False, default=False)
    width, heads, positions = config.integer("d_model"), config.integer("attention_heads"), config.integer("max_position_embeddings")
    norm, ff = Norm("layer", 1e-5, bias=True), plain_mlp(config.integer("ffn_dim"), activation(config, "activation_function"))
    layer = Layer(Heads.each(heads, width).attention(bias=True), ff, norm, ff_in=norm)
    scale = width**0.5 if config.flag("scale_embedding", default=True) else 1.0
    embed = Embed(scale, positions=Sinusoids(positions + 2, offset=2, reaching=True))
    return decoder(config, width, (layer,) * config.integer("num_layers"), norm, positions, tied=True, embed=embed)


def rules(made: DecoderSpec) -> tuple[Rule, ...]:
    names = {
        "self_attn_layer_norm": "mixer_in", "final_layer_norm": "ff_in", "fc1": "ff.up", "fc2": "ff.down", "self_attn.out_proj": "mixer.o",
        **{f"self_attn.{p}_proj": f"mixer.{p}" for p in "qkv"},
    }  # fmt: skip
    return (
        Drop("model.embed_positions.weights"),
        *head_names(made.head.tied),
        Rename("model.embed_tokens.{t}", "embed.{t}"),
        Rename("model.layer_norm.{t}", "norm.{t}"),
        *renamed(names, "model.layers.{i}"),
    )


XGLM = Family("xglm", ("XGLMForCausalLM",), ("xglm",), spec, rules)
