"""Gemma 1 to 3 (text): norms with 1 + w, scaled embeddings; from 2 on sandwich norms and windows, in 3 two thetas and norms of q and k."""

from __future__ import annotations

from dataclasses import replace

from pagoda.models.config import Config
from pagoda.models.families.common import Heads, activation, change_layers, decoder, llama_rules, plain_names, rms, rope, windows
from pagoda.models.family import Family
from pagoda.models.rope import Rope
from pagoda.models.spec import Bidirectional, DecoderSpec, Embed, Layer, Mlp, QkNorm, Window

SANDWICH = {
    "input_layernorm": "mixer_in",
    "post_attention_layernorm": "mixer_out",
    "pre_feedforward_layernorm": "ff_in",
    "post_feedforward_layernorm": "ff_out",
}


def gemma(config: Config) -> DecoderSpec:
    heads, norm = Heads.read(config, config.integer("hidden_size")), rms(config, offset=1.0)
    config.require("use_bidirectional_attention", None, False)
    attention = heads.attention(rope(config, heads.head_dim), config.flag("attention_bias", default=False))
    # The first release said "gelu" and meant its tanh form.
    act = activation(config, "hidden_activation", "hidden_act").replace("gelu_tanh", "gelu") + "_tanh"
    ff = Mlp(config.integer("intermediate_size"), act)
    return _decoder(config, (Layer(attention, ff, mixer_in=norm, ff_in=norm),) * config.integer("num_hidden_layers"))


def gemma2(config: Config) -> DecoderSpec:
    position = rope(config, config.integer("head_dim"))
    return _decoder(config, tuple(_layer(config, window, position, None) for window in _windows(config, period=2)))


def vault_gemma(config: Config) -> DecoderSpec:
    """Gemma 2 without the norms after."""
    return change_layers(gemma2(config), lambda _, layer, attention: replace(layer, mixer_out=None, ff_out=None))


def gemma3(config: Config) -> DecoderSpec:
    head_dim = config.integer("head_dim")
    everywhere = rope(config, head_dim, part="full_attention", theta=1e6)
    local = rope(_local(config), head_dim, part="sliding_attention")
    config.ignore("rope_local_base_freq")
    norm = QkNorm(rms(config, offset=1.0))
    layers = (_layer(config, window, local if window else everywhere, norm) for window in _windows(config, period=6))
    return _decoder(config, tuple(layers))


def _layer(config: Config, window: Window | None, position: Rope, qk_norm: QkNorm | None) -> Layer:
    heads, norm = Heads.read(config, config.integer("hidden_size")), rms(config, offset=1.0)
    bias, both_ways = config.flag("attention_bias", default=False), config.flag("use_bidirectional_attention", default=False)
    if both_ways and window is not None:
        window = replace(window, size=window.size // 2)  # to each side
    softcap = config.number("attn_logit_softcapping", default=None)
    attention = heads.attention(position, bias, window=window, qk_norm=qk_norm, softcap=softcap)
    attention = replace(attention, scale=config.number("query_pre_attn_scalar", default=heads.head_dim) ** -0.5)
    ff = Mlp(config.integer("intermediate_size"), activation(config, "hidden_activation", "hidden_act"))
    return Layer(Bidirectional(attention) if both_ways else attention, ff, norm, norm, norm, norm)


def _windows(config: Config, period: int) -> tuple[Window | None, ...]:
    layers, size = config.integer("num_hidden_layers"), config.integer("sliding_window", default=None)
    period = config.integer("sliding_window_pattern", "_sliding_window_pattern", default=period)
    if config.has("layer_types"):
        return windows(config, layers, size)
    return tuple(Window("sliding", size) if size and (i + 1) % period else None for i in range(layers))


def _local(config: Config) -> Config:
    """Sliding layers in the older spelling have a theta of their own and no scaling."""
    if config.has("rope_parameters"):
        return config
    return Config({"rope_theta": config.number("rope_local_base_freq", default=10000.0)}, config.where)


def _decoder(config: Config, layers: tuple[Layer, ...]) -> DecoderSpec:
    width = config.integer("hidden_size")
    embed, longest = Embed(scale=width**0.5, round_scale=True), config.integer("max_position_embeddings")
    plain = decoder(config, width, layers, rms(config, offset=1.0), longest, tied=True, embed=embed)
    return replace(plain, head=replace(plain.head, softcap=config.number("final_logit_softcapping", default=None)))


GEMMA = Family("gemma", ("GemmaForCausalLM",), ("gemma",), gemma, plain_names)
GEMMA2 = Family("gemma2", ("Gemma2ForCausalLM",), ("gemma2",), gemma2, lambda spec: llama_rules(spec.head.tied, SANDWICH))
VAULT_GEMMA = Family(
    "vaultgemma",
    ("VaultGemmaForCausalLM",),
    ("vaultgemma",),
    vault_gemma,
    lambda spec: llama_rules(spec.head.tied, {"input_layernorm": "mixer_in", "pre_feedforward_layernorm": "ff_in"}),
)
GEMMA3 = Family("gemma3", ("Gemma3ForCausalLM",), ("gemma3_text",), gemma3, lambda spec: llama_rules(spec.head.tied, SANDWICH))
