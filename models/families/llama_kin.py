"""Decoders that are Llama but for a detail: Helium, Arcee, ERNIE 4.5, Seed-OSS, Nemotron, Hunyuan, EXAONE 4, Jais 2 and others."""

from __future__ import annotations

from dataclasses import replace

from pagoda.models.checkpoint import Rename, Rule
from pagoda.models.config import Config
from pagoda.models.families import granite, llama
from pagoda.models.families.common import change_layers, llama_rules, rms
from pagoda.models.family import Family
from pagoda.models.rope import LinearScaling, Rope
from pagoda.models.spec import Attention, DecoderSpec, Embed, Layer, Mlp, Norm, QkNorm, Xielu


def helium(config: Config) -> DecoderSpec:
    plain = llama.spec(config, "interleaved")
    return change_layers(plain, lambda _, layer, attention: replace(layer, mixer=replace(attention, out_bias=False)))


def arcee(config: Config) -> DecoderSpec:
    return change_layers(llama.spec(config), lambda _, layer, __: replace(layer, feed_forward=_plain(layer)))


def ernie(config: Config) -> DecoderSpec:
    plain, bias = llama.spec(config, "interleaved"), config.flag("use_bias", default=False)

    def change(_: int, layer: Layer, attention: Attention) -> Layer:
        assert isinstance(layer.feed_forward, Mlp)
        ff = replace(layer.feed_forward, up_bias=bias, down_bias=bias)
        return replace(layer, mixer=replace(attention, qkv_bias=bias, out_bias=bias), feed_forward=ff)

    return replace(change_layers(plain, change), head=replace(plain.head, tied=config.flag("tie_word_embeddings", default=True)))


def seed_oss(config: Config) -> DecoderSpec:
    bias = config.flag("attention_out_bias", default=False)
    plain = llama.spec(config)
    return change_layers(plain, lambda _, layer, attention: replace(layer, mixer=replace(attention, out_bias=bias)))


def nemotron(config: Config) -> DecoderSpec:
    norm = Norm("layer", config.number("norm_eps", default=1e-5), offset=1.0, bias=True)
    plain = llama.spec(config)
    changed = change_layers(plain, lambda _, layer, attention: Layer(attention, _plain(layer), norm, ff_in=norm))
    return replace(changed, norm=norm)


def hunyuan(config: Config) -> DecoderSpec:
    scaling = config.child("rope_scaling") or config.child("rope_parameters")
    alpha = scaling.number("alpha", default=None) if scaling else None
    if scaling:
        scaling.ignore("mscale", "mscale_all_dim", "beta_fast", "beta_slow")
    plain, norm = llama.spec(config), QkNorm(rms(config), after_rope=True)

    def change(_: int, layer: Layer, attention: Attention) -> Layer:
        position = attention.position
        if alpha and isinstance(position, Rope):
            # The base is stretched once and for all, whatever the length.
            position = Rope(position.theta * alpha ** (position.dims / (position.dims - 2)), position.dims, position.style)
        return replace(layer, mixer=replace(attention, position=position, qk_norm=norm))

    return change_layers(plain, change)


def exaone4(config: Config) -> DecoderSpec:
    config.ignore("sliding_window_pattern")
    norm, hybrid = rms(config), config.has("sliding_window")

    def change(_: int, layer: Layer, attention: Attention) -> Layer:
        position = attention.position if attention.window or not hybrid else None
        return Layer(replace(attention, position=position, qk_norm=QkNorm(norm)), layer.feed_forward, mixer_out=norm, ff_out=norm)

    return change_layers(llama.spec(config), change)


def jais2(config: Config) -> DecoderSpec:
    norm = Norm("layer", config.number("layer_norm_eps", default=1e-5), bias=True)
    changed = change_layers(llama.spec(config), lambda _, layer, attention: Layer(attention, _plain(layer), norm, ff_in=norm))
    return replace(changed, norm=norm)


def internlm3(config: Config) -> DecoderSpec:
    bias = config.flag("qkv_bias", default=False)
    plain = llama.spec(config)
    return change_layers(plain, lambda _, layer, a: replace(layer, mixer=replace(a, qkv_bias=a.qkv_bias or bias)))


def hyperclova(config: Config) -> DecoderSpec:
    scaled = granite.spec(config)
    if not config.flag("use_post_norm", default=False):
        return scaled
    return change_layers(scaled, lambda _, layer, attention: replace(layer, mixer_out=rms(config), ff_out=rms(config)))


def apertus(config: Config) -> DecoderSpec:
    config.require("hidden_act", "xielu", default="xielu")
    # The activation is not one of the named ones, so the rest is read as if it were.
    norm, hidden = QkNorm(rms(config, 1e-5)), config.integer("intermediate_size")
    plain = llama.spec(config, act="relu2")
    ff = Mlp(hidden, Xielu(), gated=False)
    return change_layers(plain, lambda _, layer, a: replace(layer, mixer=replace(a, qk_norm=norm), feed_forward=ff))


def nanochat(config: Config) -> DecoderSpec:
    """No norm has weights; q and k are normed after they are turned, and turn backwards."""
    plain, norm = llama.spec(config), Norm("rms", config.number("rms_norm_eps", default=1e-6), weight=False)
    normed = QkNorm(norm, after_rope=True)

    def change(_: int, layer: Layer, attention: Attention) -> Layer:
        assert isinstance(attention.position, Rope)
        mixer = replace(attention, qk_norm=normed, position=replace(attention.position, scaling=LinearScaling(-1.0)))
        return Layer(mixer, _plain(layer), norm, ff_in=norm)

    head = replace(plain.head, softcap=config.number("final_logit_softcapping", default=None))
    return replace(change_layers(plain, change), embed=Embed(norm=norm), norm=norm, head=head)


def _plain(layer: Layer) -> Mlp:
    assert isinstance(layer.feed_forward, Mlp)
    return replace(layer.feed_forward, gated=False)


def _rules(spec: DecoderSpec) -> tuple[Rule, ...]:
    return llama_rules(spec.head.tied)


def qk_norm_rules() -> tuple[Rule, ...]:
    names = {"query": "q", "key": "k"}
    return tuple(Rename(f"layers.{{i}}.self_attn.{a}_layernorm.{{t}}", f"layers.{{i}}.mixer.{b}_norm.{{t}}") for a, b in names.items())


def _hunyuan_rules(spec: DecoderSpec) -> tuple[Rule, ...]:
    return (*llama_rules(spec.head.tied), *qk_norm_rules())


def _hyperclova_rules(spec: DecoderSpec) -> tuple[Rule, ...]:
    norms = {"input_layernorm": "mixer_in", "post_norm1": "mixer_out", "post_attention_layernorm": "ff_in", "post_norm2": "ff_out"}
    return llama_rules(spec.head.tied, norms)


def _exaone_rules(spec: DecoderSpec) -> tuple[Rule, ...]:
    return llama_rules(spec.head.tied, {"post_attention_layernorm": "mixer_out", "post_feedforward_layernorm": "ff_out"})


def _apertus_rules(spec: DecoderSpec) -> tuple[Rule, ...]:
    slots = {"attention_layernorm": "mixer_in", "feedforward_layernorm": "ff_in"}
    return (*llama_rules(spec.head.tied, slots), Rename("layers.{i}.mlp.act_fn.{n}", "layers.{i}.ff.act.{n}"))


def _nanochat_rules(spec: DecoderSpec) -> tuple[Rule, ...]:
    names = {"fc1": "up", "fc2": "down"}
    return (*llama_rules(spec.head.tied), *(Rename(f"layers.{{i}}.mlp.{a}.{{t}}", f"layers.{{i}}.ff.{b}.{{t}}") for a, b in names.items()))


LLAMA_KIN = (
    Family("apertus", ("ApertusForCausalLM",), ("apertus",), apertus, _apertus_rules),
    Family("nanochat", ("NanoChatForCausalLM",), ("nanochat",), nanochat, _nanochat_rules),
    Family("helium", ("HeliumForCausalLM",), ("helium",), helium, _rules),
    Family("arcee", ("ArceeForCausalLM",), ("arcee",), arcee, _rules),
    Family("ernie4_5", ("Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM"), ("ernie4_5",), ernie, _rules),
    Family("seed_oss", ("SeedOssForCausalLM",), ("seed_oss",), seed_oss, _rules),
    Family("nemotron", ("NemotronForCausalLM",), ("nemotron",), nemotron, _rules),
    Family("hunyuan_v1_dense", ("HunYuanDenseV1ForCausalLM",), ("hunyuan_v1_dense",), hunyuan, _hunyuan_rules),
    Family("jais2", ("Jais2ForCausalLM",), ("jais2",), jais2, _rules),
    Family("internlm3", ("InternLM3ForCausalLM",), ("internlm3",), internlm3, _rules),
    Family("hyperclovax", ("HyperCLOVAXForCausalLM",), ("hyperclovax",), hyperclova, _hyperclova_rules),
    Family("exaone4", ("Exaone4ForCausalLM",), ("exaone4",), exaone4, _exaone_rules),
)
