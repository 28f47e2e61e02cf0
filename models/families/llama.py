"""Llama and what shares its shape: Mistral, Yi, Solar, SmolLM 1 and 2, Emu 3, … and the language model of Llama 3.2 Vision."""

from __future__ import annotations

from dataclasses import replace

from pagoda.models.checkpoint import Drop, Rename, Rule
from pagoda.models.config import Config
from pagoda.models.families.common import Heads, activation, decoder, max_positions, plain_names, rms, rope, split, windows
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


def mllama(config: Config) -> DecoderSpec:
    """Of a text without images the layers that would attend to them change nothing."""
    plain = spec(config)
    passed = config.list("cross_attention_layers", kind=int, default=tuple(range(3, 40, 5)))
    layers = (Layer(None, None) if i in passed else layer for i, layer in enumerate(plain.layers))
    return replace(plain, layers=tuple(layers))


def mllama_rules(spec: DecoderSpec) -> tuple[Rule, ...]:
    """Behind the vocabulary's rows lie those of an image's tokens."""
    passed = (Drop(f"model.layers.{i}.{{x*}}") for i, layer in enumerate(spec.layers) if layer.mixer is None)
    table = "model.embed_tokens"
    return (
        *passed,
        split(table, table, ("text", "image"), (spec.vocab, 8)),
        Drop(f"{table}.image.{{t}}"),
        Rename(f"{table}.text.{{t}}", f"{table}.{{t}}"),
        *plain_names(spec),
    )


MLLAMA = Family("mllama", ("MllamaForCausalLM",), ("mllama_text_model",), mllama, mllama_rules)
PADDLE = Family("paddleocr_vl", (), ("paddleocr_vl_text",), paddle, plain_names)
LLAMA = Family(
    "llama",
    ("LlamaForCausalLM", "MistralForCausalLM", "MinistralForCausalLM", "CwmForCausalLM", "IQuestCoderForCausalLM", "Emu3ForCausalLM"),
    ("llama", "mistral", "ministral", "cwm", "iquestcoder", "emu3_text_model"),
    spec,
    plain_names,
)
