"""Llama and what shares its shape: Mistral, Yi, Solar, SmolLM 1 and 2, …"""

from __future__ import annotations

from pagoda.models.config import Config
from pagoda.models.families.common import Heads, activation, decoder, max_positions, plain_names, rms, rope, windows
from pagoda.models.family import Family
from pagoda.models.rope import RopeStyle
from pagoda.models.spec import DecoderSpec, Layer, Mlp


def spec(config: Config, style: RopeStyle = "neox", hidden: int | None = None, act: str | None = None) -> DecoderSpec:
    """`hidden`: width of the feed-forward, where the configuration has no `intermediate_size`; `act`: its activation, likewise."""
    width, layers = config.integer("hidden_size"), config.integer("num_hidden_layers")
    heads, norm = Heads.read(config, width), rms(config)
    position = rope(config, heads.head_dim, style)
    bias, mlp_bias = config.flag("attention_bias", default=False), config.flag("mlp_bias", default=False)
    ff = Mlp(hidden or config.integer("intermediate_size"), act or activation(config, "hidden_act"), up_bias=mlp_bias, down_bias=mlp_bias)
    made = (
        Layer(heads.attention(position, bias, window=window), ff, mixer_in=norm, ff_in=norm)
        for window in windows(config, layers, config.integer("sliding_window", default=None))
    )
    return decoder(config, width, made, norm, max_positions(config, position.scaling))


def paddle(config: Config) -> DecoderSpec:
    bias = config.flag("use_bias", default=False)
    return spec(config.having({"attention_bias": bias, "mlp_bias": bias}))


PADDLE = Family("paddleocr_vl", (), ("paddleocr_vl_text",), paddle, plain_names)
LLAMA = Family(
    "llama",
    ("LlamaForCausalLM", "MistralForCausalLM", "MinistralForCausalLM", "CwmForCausalLM", "IQuestCoderForCausalLM"),
    ("llama", "mistral", "ministral", "cwm", "iquestcoder"),
    spec,
    plain_names,
)
