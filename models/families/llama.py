"""Llama and what shares its shape: Mistral, Yi, Solar, SmolLM 1 and 2, …"""

from __future__ import annotations

from pagoda.models.config import Config
from pagoda.models.families.common import Heads, activation, llama_rules, max_positions, rms, rope, windows
from pagoda.models.family import Family
from pagoda.models.rope import RopeStyle
from pagoda.models.spec import Attention, DecoderSpec, Embed, Head, Layer, Mlp, Window


def spec(config: Config, style: RopeStyle = "neox", hidden: int | None = None, act: str | None = None) -> DecoderSpec:
    """`hidden`: width of the feed-forward, where the configuration has no `intermediate_size`; `act`: its activation, likewise."""
    width, layers = config.integer("hidden_size"), config.integer("num_hidden_layers")
    heads, norm = Heads.read(config, width), rms(config)
    position = rope(config, heads.head_dim, style)
    bias, mlp_bias = config.flag("attention_bias", default=False), config.flag("mlp_bias", default=False)
    ff = Mlp(hidden or config.integer("intermediate_size"), act or activation(config, "hidden_act"), up_bias=mlp_bias, down_bias=mlp_bias)

    def layer(window: Window | None) -> Layer:
        attention = Attention(
            heads.heads, heads.kv_heads, heads.head_dim, heads.head_dim**-0.5, position, window, qkv_bias=bias, out_bias=bias
        )
        return Layer(attention, ff, mixer_in=norm, ff_in=norm)

    return DecoderSpec(
        vocab=config.integer("vocab_size"),
        width=width,
        layers=tuple(layer(window) for window in windows(config, layers, config.integer("sliding_window", default=None))),
        norm=norm,
        embed=Embed(),
        head=Head(tied=config.flag("tie_word_embeddings", default=False)),
        max_positions=max_positions(config, position.scaling),
    )


LLAMA = Family(
    "llama",
    ("LlamaForCausalLM", "MistralForCausalLM", "MinistralForCausalLM", "CwmForCausalLM", "IQuestCoderForCausalLM"),
    ("llama", "mistral", "ministral", "cwm", "iquestcoder"),
    spec,
    lambda spec: llama_rules(spec.head.tied),
)
