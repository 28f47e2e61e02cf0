"""Whisper and Speech2Text: spectra through convolutions into an encoder, text out of a decoder of BART's line."""

from __future__ import annotations

from dataclasses import replace

from pagoda.models.checkpoint import Drop, Rename, Rule, Zeros
from pagoda.models.config import Config
from pagoda.models.families.bart import bart_layers, pre_norm_names
from pagoda.models.families.common import activation, head_names
from pagoda.models.family import Family
from pagoda.models.positions import Learned, Sinusoids
from pagoda.models.sound import Sound, TimeConv
from pagoda.models.spec import DecoderSpec, Embed, Head, Norm

_HARMLESS = (
    "num_hidden_layers", "suppress_tokens", "begin_suppress_tokens", "forced_decoder_ids", "use_weighted_layer_sum",
    "classifier_proj_size", "apply_spec_augment", "mask_time_prob", "mask_time_length", "mask_time_min_masks", "mask_feature_prob",
    "mask_feature_length", "mask_feature_min_masks", "median_filter_width", "alignment_heads",
)  # fmt: skip


def whisper(config: Config) -> DecoderSpec:
    width, source, target = config.integer("d_model"), config.integer("max_source_positions"), config.integer("max_target_positions")
    config.ignore(*_HARMLESS)
    bins = config.integer("num_mel_bins")
    convs = (TimeConv(width, 3, 1, 1), TimeConv(width, 3, 2, 1))
    scale = width**0.5 if config.flag("scale_embedding", default=False) else 1.0
    return _spec(config, Sound(bins, convs, Learned(source), log_mel=True), Embed(scale, positions=Learned(target)), source, target)


def _spec(config: Config, sound: Sound, embed: Embed, source: int, target: int) -> DecoderSpec:
    width, norm = config.integer("d_model"), Norm("layer", 1e-5, bias=True)
    encoder, layers = bart_layers(config, activation(config, "activation_function"), norm, source)
    tied = config.flag("tie_word_embeddings", default=True)
    encoder = replace(encoder, entry=sound, longest=source, vocab=0, shared=False)
    return DecoderSpec(config.integer("vocab_size"), width, layers, norm, embed, Head(tied), target, encoder=encoder)


def whisper_rules(spec: DecoderSpec) -> tuple[Rule, ...]:
    return (
        *(Rename(f"model.encoder.conv{i + 1}.{{t}}", f"encoder.embed.{i}.{{t}}") for i in range(2)),
        Rename("model.encoder.embed_positions.weight", "encoder.embed.positions"),
        Rename("model.decoder.embed_tokens.{t}", "embed.{t}"),
        Rename("model.decoder.embed_positions.weight", "embed.positions"),
        *head_names(spec.head.tied, "proj_out"),
        *pre_norm_names(spec),
        Zeros("layers.{i}.mixer.k.weight", "layers.{i}.mixer.k.bias"),
        Zeros("encoder.layers.{i}.mixer.k.weight", "encoder.layers.{i}.mixer.k.bias"),
    )


def speech2text(config: Config) -> DecoderSpec:
    width, source, target = config.integer("d_model"), config.integer("max_source_positions"), config.integer("max_target_positions")
    config.ignore(*_HARMLESS)
    config.require("input_channels", 1, default=1)
    pad, wide = config.integer("pad_token_id", default=1), config.integer("conv_channels")
    kernels = config.list("conv_kernel_sizes", kind=int)
    widths = (*(wide,) * (config.integer("num_conv_layers") - 1), 2 * width)
    convs = tuple(TimeConv(out, kernel, 2, kernel // 2, "glu") for out, kernel in zip(widths, kernels, strict=True))
    scale = width**0.5 if config.flag("scale_embedding", default=True) else 1.0
    sines = Sinusoids(max(source, target) + pad + 1, pad + 1, reaching=True)
    # Frames are counted by ids of 0, and a padding's id of 0 makes all of them padding, which has no positions.
    sound = Sound(config.integer("input_feat_per_channel"), convs, sines if pad else None, scale)
    return _spec(config, sound, Embed(scale, positions=sines), source, target)


def speech2text_rules(spec: DecoderSpec) -> tuple[Rule, ...]:
    return (
        Rename("model.encoder.conv.conv_layers.{i}.{t}", "encoder.embed.{i}.{t}"),
        *(Drop(f"model.{side}.embed_positions.{{x*}}") for side in ("encoder", "decoder")),
        Rename("model.decoder.embed_tokens.{t}", "embed.{t}"),
        *head_names(spec.head.tied),
        *pre_norm_names(spec),
    )


WHISPER_KIN = (
    Family("whisper", ("WhisperForConditionalGeneration",), (), whisper, whisper_rules),
    Family("speech_to_text", ("Speech2TextForConditionalGeneration",), (), speech2text, speech2text_rules),
)
