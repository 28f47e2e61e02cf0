"""T5 and its line: mT5, Flan-T5, UMT5; learned biases by distance, RMS norms, no biases of linear layers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from pagoda.hal.errors import ModelError
from pagoda.models.checkpoint import Drop, Rename, Rule
from pagoda.models.config import Config
from pagoda.models.distance import Distances
from pagoda.models.families.common import ACTIVATIONS, head_names, renamed
from pagoda.models.families.seq2seq import decoder_layers, decoder_names, encoder_layer
from pagoda.models.family import Family
from pagoda.models.spec import Attention, Bidirectional, Cross, DecoderSpec, Embed, Encoder, Head, Mlp, Norm, Window

LONGEST = 4096
"""Tokens that the encoder and the decoder may have where the configuration says nothing: distances know no end."""


def t5(config: Config, own: bool = False, scales: bool = True) -> DecoderSpec:
    """`own`: each layer has its own biases. `scales`: a tied head is scaled."""
    width, heads, dim = config.integer("d_model"), config.integer("num_heads"), config.integer("d_kv")
    config.ignore("n_positions", "dropout_rate", "dense_act_fn", "is_gated_act")
    config.ignore("scalable_attention")
    norm = Norm("rms", config.number("layer_norm_epsilon", default=1e-6))
    buckets, far = config.integer("relative_attention_num_buckets"), config.integer("relative_attention_max_distance", default=128)
    attention = Attention(heads, heads, dim, 1.0, Distances(buckets, far, own))
    cross = Cross(Attention(heads, heads, dim, 1.0), width, LONGEST)
    ff, vocab = feed_forward(config), config.integer("vocab_size")
    tied = config.flag("tie_word_embeddings", default=True)
    scaled = config.flag("scale_decoder_outputs", default=tied) and scales
    layers = config.integer("num_layers")
    return DecoderSpec(
        vocab=vocab,
        width=width,
        layers=decoder_layers(attention, cross, ff, norm) * config.integer("num_decoder_layers", default=layers),
        norm=norm,
        embed=Embed(),
        head=Head(tied, width**-0.5 if scaled else 1.0),
        max_positions=LONGEST,
        encoder=Encoder(width, (encoder_layer(attention, ff, norm),) * layers, norm, Embed(), LONGEST, vocab, shared=True),
    )


def longt5(config: Config) -> DecoderSpec:
    """The encoder's layers see `local_radius` tokens to each side."""
    config.require("encoder_attention_type", "local", default="local")
    config.ignore("global_block_size")
    spec = t5(config)
    assert spec.encoder is not None
    window = Window("sliding", config.integer("local_radius"))
    layer = spec.encoder.layers[0]
    assert isinstance(layer.mixer, Bidirectional)
    near = replace(layer, mixer=Bidirectional(replace(layer.mixer.attention, window=window)))
    return replace(spec, encoder=replace(spec.encoder, layers=(near,) * len(spec.encoder.layers)))


def longt5_rules(spec: DecoderSpec) -> tuple[Rule, ...]:
    return (Rename("encoder.block.{i}.layer.0.LocalSelfAttention.{x*}", "encoder.block.{i}.layer.0.SelfAttention.{x*}"), *t5_rules(spec))


def feed_forward(config: Config) -> Mlp:
    """`feed_forward_proj`: an activation, or `gated-` and an activation, where `gated-gelu` means GELU by tanh."""
    named = config.text("feed_forward_proj", default="relu")
    gated, name = named.startswith("gated-"), named.removeprefix("gated-")
    name = "gelu_new" if named == "gated-gelu" else name
    if name not in ACTIVATIONS:
        raise ModelError(f"{config.where}: feed_forward_proj={named!r} is not implemented; known: {', '.join(ACTIVATIONS)}")
    return Mlp(config.integer("d_ff"), ACTIVATIONS[name], gated)


_ATTENTION = {name: f"mixer.{name}" for name in "qkvo"}


def _names(place: int, cross: bool = False) -> dict[str, str]:
    kind = "EncDecAttention" if cross else "SelfAttention"
    found = {f"layer.{place}.{kind}.{theirs}": ours for theirs, ours in _ATTENTION.items()}
    return {**found, f"layer.{place}.layer_norm": "mixer_in"}


def _feed_forward(place: int, gated: bool) -> dict[str, str]:
    wide = {"wi_0": "gate", "wi_1": "up"} if gated else {"wi": "up"}
    names = {f"layer.{place}.DenseReluDense.{theirs}": f"ff.{ours}" for theirs, ours in {**wide, "wo": "down"}.items()}
    return {**names, f"layer.{place}.layer_norm": "ff_in"}


def t5_rules(spec: DecoderSpec, own: bool = False) -> tuple[Rule, ...]:
    first = spec.layers[1].feed_forward
    gated = isinstance(first, Mlp) and first.gated
    count = len(spec.layers) // 2
    bias = "layer.0.SelfAttention.relative_attention_bias.weight"
    if own:
        below = tuple(Rename(f"decoder.block.{i}.{bias}", f"layers.{2 * i}.mixer.distances") for i in range(count))
        biases = (*below, Rename(f"encoder.block.{{i}}.{bias}", "encoder.layers.{i}.mixer.distances"))
    else:
        biases = (Rename(f"decoder.block.0.{bias}", "distances"), Rename(f"encoder.block.0.{bias}", "encoder.distances"))
    return (
        Drop("encoder.embed_tokens.weight"),
        Drop("decoder.embed_tokens.weight"),
        Drop("decoder.block.{i}.layer.1.EncDecAttention.relative_attention_bias.weight"),
        Rename("shared.{t}", "embed.{t}"),
        *head_names(spec.head.tied),
        Rename("decoder.final_layer_norm.{t}", "norm.{t}"),
        Rename("encoder.final_layer_norm.{t}", "encoder.norm.{t}"),
        *biases,
        *decoder_names("decoder.block", count, _names(0), {**_names(1, cross=True), **_feed_forward(2, gated)}),
        *renamed({**_names(0), **_feed_forward(1, gated)}, "encoder.block.{i}", "encoder.layers.{i}"),
    )


T5_KIN = (
    Family("t5", ("T5ForConditionalGeneration",), (), t5, t5_rules),
    Family("mt5", ("MT5ForConditionalGeneration",), (), partial(t5, scales=False), t5_rules),
    Family("longt5", ("LongT5ForConditionalGeneration",), (), longt5, longt5_rules),
    Family("umt5", ("UMT5ForConditionalGeneration",), (), partial(t5, own=True), partial(t5_rules, own=True)),
)
