"""Moonshine: the sound's own samples through three convolutions, rotary positions in encoder and decoder."""

from __future__ import annotations

from pagoda.models.checkpoint import Rename, Rule, Split
from pagoda.models.config import Config
from pagoda.models.families.common import activation, head_names, plain_mlp, renamed, rope
from pagoda.models.families.seq2seq import decoder_layers, decoder_names, encoder_layer
from pagoda.models.family import Family
from pagoda.models.sound import Sound, TimeConv
from pagoda.models.spec import Attention, Cross, DecoderSpec, Embed, Encoder, Head, Mlp, Norm

LONGEST = 1500
"""Tokens of the encoder, 24 ms each: rotary positions know no end."""


def moonshine(config: Config) -> DecoderSpec:
    width, vocab, hidden = config.integer("hidden_size"), config.integer("vocab_size"), config.integer("intermediate_size")
    config.require("pad_head_dim_to_multiple_of", None, default=None)
    config.ignore("partial_rotary_factor")
    norm, bias = Norm("layer", 1e-5), config.flag("attention_bias", default=False)
    if not config.has("rope_parameters"):
        config = config.having({"partial_rotary_factor": config.number("partial_rotary_factor", default=0.9)})
    reads, own = (_attention(config, side, width, bias) for side in ("encoder", "decoder"))
    cross = Cross(Attention(own.heads, own.kv_heads, own.head_dim, own.scale, qkv_bias=bias), width, LONGEST)
    plain = plain_mlp(hidden, activation(config, "encoder_hidden_act"))
    gated = Mlp(hidden, activation(config, "decoder_hidden_act"), up_bias=True, down_bias=True)
    convs = (
        TimeConv(width, 127, 64, activation="tanh", bias=False, normed=True),
        TimeConv(2 * width, 7, 3),
        TimeConv(width, 3, 2),
    )
    layers = (encoder_layer(reads, plain, norm),) * config.integer("encoder_num_hidden_layers")
    return DecoderSpec(
        vocab=vocab,
        width=width,
        layers=decoder_layers(own, cross, gated, norm) * config.integer("decoder_num_hidden_layers"),
        norm=norm,
        embed=Embed(),
        head=Head(config.flag("tie_word_embeddings", default=True)),
        max_positions=config.integer("max_position_embeddings"),
        encoder=Encoder(width, layers, norm, Sound(0, convs), LONGEST),
    )


def _attention(config: Config, side: str, width: int, bias: bool) -> Attention:
    heads = config.integer(f"{side}_num_attention_heads")
    kv, dim = config.integer(f"{side}_num_key_value_heads", default=heads), width // heads
    return Attention(heads, kv, dim, dim**-0.5, rope(config, dim, "interleaved"), qkv_bias=bias)


def _heads(theirs: str) -> dict[str, str]:
    return {f"{theirs}.{name}_proj": f"mixer.{name}" for name in "qkvo"}


def moonshine_rules(spec: DecoderSpec) -> tuple[Rule, ...]:
    own = {**_heads("self_attn"), "input_layernorm": "mixer_in"}
    cross = {**_heads("encoder_attn"), "post_attention_layernorm": "mixer_in", "final_layernorm": "ff_in", "mlp.fc2": "ff.down"}
    read = {**own, "post_attention_layernorm": "ff_in", "mlp.fc1": "ff.up", "mlp.fc2": "ff.down"}
    count = len(spec.layers) // 2
    return (
        *(Rename(f"model.encoder.conv{i + 1}.{{t}}", f"encoder.embed.{i}.{{t}}") for i in range(3)),
        Rename("model.encoder.groupnorm.{t}", "encoder.embed.0.norm.{t}"),
        Rename("model.encoder.layer_norm.{t}", "encoder.norm.{t}"),
        Rename("model.decoder.norm.{t}", "norm.{t}"),
        Rename("model.decoder.embed_tokens.{t}", "embed.{t}"),
        *head_names(spec.head.tied, "proj_out"),
        *(Split(f"model.decoder.layers.{i}.mlp.fc1.{{t}}", (_wide(i, "up"), _wide(i, "gate"))) for i in range(count)),
        *decoder_names("model.decoder.layers", count, own, cross),
        *renamed(read, "model.encoder.layers.{i}", "encoder.layers.{i}"),
    )


def _wide(layer: int, name: str) -> str:
    return f"layers.{2 * layer + 1}.ff.{name}.{{t}}"


MOONSHINE = Family("moonshine", ("MoonshineForConditionalGeneration",), (), moonshine, moonshine_rules)
