"""Of BART's kind with other names or an encoder that sees less: LED, BigBird-Pegasus, SeamlessM4T's text model."""

from __future__ import annotations

from dataclasses import replace

from pagoda.models.checkpoint import Drop, Rename, Rule
from pagoda.models.config import Config
from pagoda.models.families.bart import BART, M2M, PEGASUS, Line, bart, bart_rules
from pagoda.models.family import Family
from pagoda.models.positions import Learned
from pagoda.models.spec import Bidirectional, Cross, DecoderSpec, Encoder, Layer, Window

_LED = Line(post=True, embed_norm=True, positions=BART.positions)


def led(config: Config) -> DecoderSpec:
    """Encoder layers see so many tokens to each side; tokens that see all are none unless a caller says so, which nobody can here."""
    source, target = config.integer("max_encoder_position_embeddings"), config.integer("max_decoder_position_embeddings")
    given = config.values["attention_window"]
    config.ignore("attention_window")
    spec = bart(_LED)(config.having({"max_position_embeddings": max(source, target)}))
    assert spec.encoder is not None
    count = len(spec.encoder.layers)
    sizes = given if isinstance(given, list) else [given] * count
    layers = tuple(_windowed(layer, size // 2) for layer, size in zip(spec.encoder.layers, sizes, strict=True))
    above, below = (replace(spec.embed, positions=Learned(rows)) for rows in (source, target))
    encoder = replace(spec.encoder, layers=layers, entry=above, longest=source)
    return replace(_crossing(spec, source), embed=below, max_positions=target, encoder=encoder)


def _windowed(layer: Layer, size: int) -> Layer:
    assert isinstance(layer.mixer, Bidirectional)
    return replace(layer, mixer=Bidirectional(replace(layer.mixer.attention, window=Window("sliding", size))))


def _crossing(spec: DecoderSpec, longest: int) -> DecoderSpec:
    """The spec with cross-attention to at most so many tokens."""
    layers = tuple(
        replace(layer, mixer=replace(layer.mixer, longest=longest)) if isinstance(layer.mixer, Cross) else layer for layer in spec.layers
    )
    return replace(spec, layers=layers)


def led_rules(spec: DecoderSpec) -> tuple[Rule, ...]:
    at = "led.encoder.layers.{i}.self_attn"
    inner = f"{at}.longformer_self_attn"
    return (
        *(Drop(f"{inner}.{name}_global.{{t}}") for name in ("query", "key", "value")),
        *(Rename(f"{inner}.{theirs}.{{t}}", f"{at}.{ours}_proj.{{t}}") for theirs, ours in _LONG.items()),
        Rename(f"{at}.output.{{t}}", f"{at}.out_proj.{{t}}"),
        Rename("led.{x*}", "model.{x*}"),
        *bart_rules(spec),
    )


_LONG = {"query": "q", "key": "k", "value": "v"}


def bigbird_pegasus(config: Config) -> DecoderSpec:
    """Up to so many tokens its encoder attends to all, as in transformers; beyond, blocks would be sparse, which is not here."""
    config.ignore("attention_type")
    config = config.having({} if config.has("scale_embedding") else {"scale_embedding": True})
    spec = bart(PEGASUS)(config)
    longest = min(spec.max_positions, (5 + 2 * config.integer("num_random_blocks", default=3)) * config.integer("block_size", default=64))
    assert spec.encoder is not None
    bias = config.flag("use_bias", default=False)
    encoder: Encoder = replace(spec.encoder, longest=longest, layers=tuple(_biased(layer, bias) for layer in spec.encoder.layers))
    spec = replace(_crossing(spec, longest), encoder=encoder)
    return replace(spec, layers=tuple(_biased(layer, bias) for layer in spec.layers))


def _biased(layer: Layer, bias: bool) -> Layer:
    mixer = layer.mixer
    attention = getattr(mixer, "attention", mixer)
    changed = replace(attention, qkv_bias=bias, out_bias=bias)
    return replace(layer, mixer=changed if mixer is attention else replace(mixer, attention=changed))  # type: ignore[type-var]


def bigbird_pegasus_rules(spec: DecoderSpec) -> tuple[Rule, ...]:
    at = "model.encoder.layers.{i}.self_attn"
    return (
        *(Rename(f"{at}.self.{theirs}.{{t}}", f"{at}.{ours}_proj.{{t}}") for theirs, ours in _LONG.items()),
        Rename(f"{at}.output.{{t}}", f"{at}.out_proj.{{t}}"),
        *(Rename(f"model.{side}.layernorm_embedding.{{t}}", f"model.{side}.layer_norm.{{t}}") for side in ("encoder", "decoder")),
        *bart_rules(spec),
    )


def seamless(config: Config) -> DecoderSpec:
    """The text model within: speech in and out have configurations and tensors of their own, which are left alone."""
    names = ("adaptor", "conv", "feature", "lang", "leaky", "num_", "position_", "resblock", "rotary", "sampling", "speech", "spkr", "t2u")
    others = ("unit", "left_max", "right_max", "upsample", "var_", "variance", "vocoder", "max_new", "max_source", "add_adapter", "char_")
    config.ignore(*(key for key in config.values if key.startswith((*names, *others, "adapter"))), "layer_norm_eps")
    return bart(M2M)(config.having({"d_model": config.integer("hidden_size")}))


def seamless_rules(spec: DecoderSpec) -> tuple[Rule, ...]:
    crossed = {"cross_attention_layer_norm": "encoder_attn_layer_norm"}
    inner = {"ffn.fc1": "fc1", "ffn.fc2": "fc2", "ffn_layer_norm": "final_layer_norm", **crossed}
    sides = ("encoder", "decoder")
    return (
        *(Drop(f"{part}.{{x*}}") for part in ("speech_encoder", "t2u_model", "vocoder")),
        *(Drop(f"text_{side}.embed_tokens.weight") for side in sides),
        Rename("shared.{t}", "model.shared.{t}"),
        *(Rename(f"{_AT[side]}.{a}.{{t}}", f"model.{side}.layers.{{i}}.{b}.{{t}}") for side in sides for a, b in inner.items()),
        Rename("text_decoder.layers.{i}.cross_attention.{x*}", "model.decoder.layers.{i}.encoder_attn.{x*}"),
        *(Rename(f"text_{side}.{{x*}}", f"model.{side}.{{x*}}") for side in sides),
        *bart_rules(spec),
    )


_AT = {side: f"text_{side}.layers.{{i}}" for side in ("encoder", "decoder")}

_FSMT = Line(post=True, embed_norm=False, positions=lambda longest, pad: Learned(longest + pad + 1, pad + 1), logits_bias=False)


def fsmt(config: Config) -> DecoderSpec:
    """Each side has words of its own; the head is a tensor of its own too."""
    config.ignore("langs", "tie_word_embeddings")
    spec = bart(_FSMT)(config.having({"vocab_size": config.integer("tgt_vocab_size"), "tie_word_embeddings": False}))
    assert spec.encoder is not None
    return replace(spec, encoder=replace(spec.encoder, vocab=config.integer("src_vocab_size"), shared=False))


def fsmt_rules(spec: DecoderSpec) -> tuple[Rule, ...]:
    return (
        Rename("model.decoder.output_projection.{t}", "lm_head.{t}"),
        Rename("model.encoder.embed_tokens.{t}", "encoder.embed.{t}"),
        Rename("model.decoder.embed_tokens.{t}", "model.shared.{t}"),
        *bart_rules(spec),
    )


BART_KIN_MORE = (
    Family("fsmt", ("FSMTForConditionalGeneration",), (), fsmt, fsmt_rules),
    Family("led", ("LEDForConditionalGeneration",), (), led, led_rules),
    Family("bigbird_pegasus", ("BigBirdPegasusForConditionalGeneration",), (), bigbird_pegasus, bigbird_pegasus_rules),
    Family("seamless_m4t", ("SeamlessM4TForTextToText", "SeamlessM4Tv2ForTextToText"), (), seamless, seamless_rules),
)
