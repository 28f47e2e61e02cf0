"""XGLM: GPT 2's layers in BART's words, with sines for positions."""

from __future__ import annotations

from pagoda.models.checkpoint import Drop, Rule
from pagoda.models.config import Config
from pagoda.models.families.common import BART_LAYER, Heads, activation, body_names, decoder, plain_mlp
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
    names = body_names(made, "model.embed_tokens", "model.layer_norm", "model.layers", BART_LAYER)
    return (Drop("model.embed_positions.weights"), *names)


XGLM = Family("xglm", ("XGLMForCausalLM",), ("xglm",), spec, rules)
