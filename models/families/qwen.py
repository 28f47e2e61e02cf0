"""Qwen 2 (biases on q, k, v) and Qwen 3 (norms of q and k per head)."""

from __future__ import annotations

from pagoda.models.config import Config
from pagoda.models.families.common import Heads, activation, llama_rules, max_positions, rms, rope, windows
from pagoda.models.family import Family
from pagoda.models.spec import Attention, DecoderSpec, Embed, Head, Layer, Mlp, QkNorm, Window


def qwen2(config: Config) -> DecoderSpec:
    return _spec(config, qkv_bias=True, out_bias=False, normed=False)


def qwen3(config: Config) -> DecoderSpec:
    bias = config.flag("attention_bias", default=False)
    return _spec(config, qkv_bias=bias, out_bias=bias, normed=True)


def _spec(config: Config, qkv_bias: bool, out_bias: bool, normed: bool) -> DecoderSpec:
    width = config.integer("hidden_size")
    heads, norm = Heads.read(config, width), rms(config)
    position = rope(config, heads.head_dim)
    ff = Mlp(config.integer("intermediate_size"), activation(config, "hidden_act"))

    def layer(window: Window | None) -> Layer:
        attention = Attention(
            heads.heads,
            heads.kv_heads,
            heads.head_dim,
            heads.head_dim**-0.5,
            position,
            window,
            QkNorm(norm) if normed else None,
            qkv_bias=qkv_bias,
            out_bias=out_bias,
        )
        return Layer(attention, ff, mixer_in=norm, ff_in=norm)

    return DecoderSpec(
        vocab=config.integer("vocab_size"),
        width=width,
        layers=tuple(layer(window) for window in qwen_windows(config)),
        norm=norm,
        embed=Embed(),
        head=Head(tied=config.flag("tie_word_embeddings", default=False)),
        max_positions=max_positions(config, position.scaling),
    )


def qwen_windows(config: Config) -> tuple[Window | None, ...]:
    """`sliding_window` counts only with `use_sliding_window`, and then from layer `max_window_layers` on."""
    layers, first = config.integer("num_hidden_layers"), config.integer("max_window_layers", default=0)
    size = config.integer("sliding_window", default=None)
    size = size if config.flag("use_sliding_window", default=False) else None
    if config.has("layer_types"):
        return windows(config, layers, size)
    return tuple(Window("sliding", size) if size and i >= first else None for i in range(layers))


QWEN2 = Family("qwen2", ("Qwen2ForCausalLM",), ("qwen2",), qwen2, lambda spec: llama_rules(spec.head.tied))
QWEN3 = Family("qwen3", ("Qwen3ForCausalLM",), ("qwen3",), qwen3, lambda spec: llama_rules(spec.head.tied))
