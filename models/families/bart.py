"""BART and its line: mBART, PLBart, MVP, Marian, Pegasus, Blenderbot, M2M100 and NLLB; absolute positions, biases, LayerNorm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from pagoda.models.checkpoint import Drop, Rename, Rule, Unstack
from pagoda.models.config import Config
from pagoda.models.families.common import Heads, activation, attention_names, head_names, plain_mlp, renamed
from pagoda.models.families.seq2seq import decoder_layers, decoder_names, encoder_layer, post_norm_decoder, post_norm_encoder
from pagoda.models.family import Family
from pagoda.models.spec import Attention, Cross, DecoderSpec, Embed, Encoder, Head, Layer, Learned, Mlp, Norm, Normed, Sinusoids


@dataclass(frozen=True)
class Line:
    """What the members differ in: norms after sums (`post`), a norm of the embeddings, a bias of the logits, positions by the
    longest input and the padding's id."""

    post: bool
    embed_norm: bool
    positions: Callable[[int, int], Learned | Sinusoids]
    logits_bias: bool = True


def bart(line: Line) -> Callable[[Config], DecoderSpec]:
    """How a member's configuration is read."""

    def spec(config: Config) -> DecoderSpec:
        width, vocab, longest = config.integer("d_model"), config.integer("vocab_size"), config.integer("max_position_embeddings")
        config.ignore(*_HARMLESS)
        norm, act = Norm("layer", 1e-5, bias=True), activation(config, "activation_function")
        scale = width**0.5 if config.flag("scale_embedding", default=False) else 1.0
        tied = config.flag("tie_word_embeddings", default=True)
        config.flag("share_encoder_decoder_embeddings", default=True)
        norm_before = line.embed_norm and not line.post
        embed = Embed(
            scale, positions=line.positions(longest, config.integer("pad_token_id", default=1)), norm=norm if norm_before else None
        )
        encoder, layers = bart_layers(config, act, norm, longest, line.post, line.embed_norm)
        encoder = replace(encoder, entry=embed, vocab=vocab, shared=True)
        return DecoderSpec(vocab, width, layers, norm, embed, Head(tied, bias=line.logits_bias), longest, encoder=encoder)

    return spec


_HARMLESS = (
    "num_hidden_layers", "forced_eos_token_id", "forced_bos_token_id", "normalize_before", "add_final_layer_norm", "normalize_embedding",
    "add_bias_logits", "static_position_embeddings", "extra_pos_embeddings", "num_beams", "classif_dropout", "use_prompt",
    "prompt_length", "prompt_mid_dim", "decoder_vocab_size", "force_bos_token_to_be_generated", "save_step", "min_length",
    "no_repeat_ngram_size", "early_stopping", "length_penalty", "encoder_no_repeat_ngram_size", "bad_words_ids",
)  # fmt: skip


def bart_layers(
    config: Config, act: str, norm: Norm, longest: int, post: bool = False, embed_norm: bool = False
) -> tuple[Encoder, tuple[Layer, ...]]:
    """The encoder, its way in to be replaced, and the decoder's layers, which attend to at most `longest` tokens of it."""
    width = config.integer("d_model")
    (count, reads, ff), (layers, own, wide) = (_side(config, side, width, act) for side in ("encoder", "decoder"))
    cross = Cross(own, width, longest)
    if post:
        above = post_norm_encoder(count, reads, ff, norm, embed_norm)
        below = post_norm_decoder(layers, own, cross, wide, norm, embed_norm)
    else:
        above, below = (encoder_layer(reads, ff, norm),) * count, decoder_layers(own, cross, wide, norm) * layers
    return Encoder(width, above, norm, Embed(), longest), below


def _side(config: Config, side: str, width: int, act: str) -> tuple[int, Attention, Mlp]:
    """Layers of the encoder or the decoder: how many, and what they are made of."""
    attention = Heads.each(config.integer(f"{side}_attention_heads"), width).attention(bias=True)
    return config.integer(f"{side}_layers"), attention, plain_mlp(config.integer(f"{side}_ffn_dim"), act)


FEED_FORWARD = {"fc1": "ff.up", "fc2": "ff.down"}


def bart_rules(spec: DecoderSpec) -> tuple[Rule, ...]:
    return (
        Unstack("final_logits_bias", "head.bias.{e}", "e", 1),
        Rename("head.bias.0", "head.bias"),
        Drop("model.encoder.embed_tokens.weight"),
        Drop("model.decoder.embed_tokens.weight"),
        *head_names(spec.head.tied),
        Rename("model.shared.{t}", "embed.{t}"),
        *position_names(spec.embed.positions),
        *(_post_names(spec) if isinstance(spec.layers[0].residual, Normed) else pre_norm_names(spec)),
    )


def position_names(positions: Learned | Sinusoids | None) -> tuple[Rule, ...]:
    sides = (("decoder", "embed"), ("encoder", "encoder.embed"))
    if isinstance(positions, Sinusoids):
        return tuple(Drop(f"model.{side}.embed_positions.{{x*}}") for side, _ in sides)
    return tuple(Rename(f"model.{side}.embed_positions.weight", f"{ours}.positions") for side, ours in sides)


def pre_norm_names(spec: DecoderSpec) -> tuple[Rule, ...]:
    own = {**attention_names("self_attn"), "self_attn_layer_norm": "mixer_in"}
    cross = {**attention_names("encoder_attn"), "encoder_attn_layer_norm": "mixer_in"}
    ff = {**FEED_FORWARD, "final_layer_norm": "ff_in"}
    return (
        Rename("model.decoder.layer_norm.{t}", "norm.{t}"),
        Rename("model.encoder.layer_norm.{t}", "encoder.norm.{t}"),
        Rename("model.decoder.layernorm_embedding.{t}", "embed.norm.{t}"),
        Rename("model.encoder.layernorm_embedding.{t}", "encoder.embed.norm.{t}"),
        *decoder_names("model.decoder.layers", len(spec.layers) // 2, own, cross | ff),
        *renamed(own | ff, "model.encoder.layers.{i}", "encoder.layers.{i}"),
    )


def _post_names(spec: DecoderSpec) -> tuple[Rule, ...]:
    """The norm after a sum is the norm before what comes next."""
    assert spec.encoder is not None
    cross = {**attention_names("encoder_attn"), "self_attn_layer_norm": "mixer_in", "encoder_attn_layer_norm": "ff_in", **FEED_FORWARD}
    read = {**attention_names("self_attn"), "self_attn_layer_norm": "ff_in", **FEED_FORWARD}
    below, above = len(spec.layers) // 2, len(spec.encoder.layers)
    return (
        Rename("model.decoder.layernorm_embedding.{t}", "layers.0.mixer_in.{t}"),
        Rename("model.encoder.layernorm_embedding.{t}", "encoder.layers.0.mixer_in.{t}"),
        *_ends("model.decoder.layers", below, [f"layers.{2 * i}.mixer_in" for i in range(1, below)], "norm"),
        *_ends("model.encoder.layers", above, [f"encoder.layers.{i}.mixer_in" for i in range(1, above)], "encoder.norm"),
        *decoder_names("model.decoder.layers", below, attention_names("self_attn"), cross),
        *renamed(read, "model.encoder.layers.{i}", "encoder.layers.{i}"),
    )


def _ends(at: str, count: int, slots: list[str], last: str) -> tuple[Rule, ...]:
    places = (*slots, last)
    return tuple(Rename(f"{at}.{i}.final_layer_norm.{{t}}", f"{places[i]}.{{t}}") for i in range(count))


def _learned(offset: int) -> Callable[[int, int], Learned]:
    return lambda longest, _: Learned(longest + offset, offset)


def _family(name: str, architecture: str, line: Line) -> Family:
    return Family(name, (architecture,), (), bart(line), bart_rules)


BART = Line(post=True, embed_norm=True, positions=_learned(2))
MARIAN = Line(post=True, embed_norm=False, positions=lambda longest, _: Sinusoids(longest))
MBART = Line(post=False, embed_norm=True, positions=_learned(2))
PEGASUS = Line(post=False, embed_norm=False, positions=_learned(0))
M2M = replace(PEGASUS, positions=lambda longest, pad: Sinusoids(longest + pad + 1, pad + 1, reaching=True), logits_bias=False)

BART_KIN = (
    _family("bart", "BartForConditionalGeneration", BART),
    _family("plbart", "PLBartForConditionalGeneration", BART),
    _family("mvp", "MvpForConditionalGeneration", BART),
    _family("marian", "MarianMTModel", MARIAN),
    _family("mbart", "MBartForConditionalGeneration", MBART),
    _family("pegasus", "PegasusForConditionalGeneration", PEGASUS),
    _family("blenderbot", "BlenderbotForConditionalGeneration", PEGASUS),
    _family("m2m_100", "M2M100ForConditionalGeneration", M2M),
)
