"""Decoders that are Llama but for a detail: Helium, Arcee, ERNIE 4.5, Seed-OSS, Nemotron, Hunyuan, StarCoder 2, StableLM and others."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from pagoda.models.checkpoint import Rename, Rule, Stack, UnitRows
from pagoda.models.config import Config
from pagoda.models.families import granite, llama
from pagoda.models.families.common import (
    attention_of,
    change_layers,
    llama_rules,
    plain_names,
    rms,
    split,
    with_attention,
)
from pagoda.models.families.olmo import AFTER
from pagoda.models.families.qwen import qwen_windows
from pagoda.models.family import Family
from pagoda.models.rope import LinearScaling, Rope
from pagoda.models.spec import Alibi, Attention, DecoderSpec, Embed, Layer, Mlp, Norm, QkNorm, Residual, Xielu


def helium(config: Config) -> DecoderSpec:
    return with_attention(llama.spec(config, "interleaved"), out_bias=False)


def arcee(config: Config) -> DecoderSpec:
    return change_layers(llama.spec(config), lambda _, layer, __: replace(layer, feed_forward=_plain(layer)))


def ernie(config: Config) -> DecoderSpec:
    plain, bias = llama.spec(config, "interleaved"), config.flag("use_bias", default=False)

    def change(_: int, layer: Layer, attention: Attention) -> Layer:
        assert isinstance(layer.feed_forward, Mlp)
        ff = replace(layer.feed_forward, up_bias=bias, down_bias=bias)
        return replace(layer, mixer=replace(attention, qkv_bias=bias, out_bias=bias), feed_forward=ff)

    return _tied(config, change_layers(plain, change))


def seed_oss(config: Config) -> DecoderSpec:
    return with_attention(llama.spec(config), out_bias=config.flag("attention_out_bias", default=False))


def nemotron(config: Config) -> DecoderSpec:
    return _layer_normed(config, Norm("layer", config.number("norm_eps", default=1e-5), offset=1.0, bias=True))


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
    return _layer_normed(config, Norm("layer", config.number("layer_norm_eps", default=1e-5), bias=True))


def internlm3(config: Config) -> DecoderSpec:
    plain, bias = llama.spec(config), config.flag("qkv_bias", default=False)
    return with_attention(plain, qkv_bias=attention_of(plain).qkv_bias or bias)


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


def smollm3(config: Config) -> DecoderSpec:
    """Some layers know no positions."""
    plain, seen = llama.spec(config), qwen_windows(config)
    interval = config.integer("no_rope_layer_interval", default=4)
    default = tuple(int((i + 1) % interval != 0) for i in range(len(plain.layers)))
    rotated = config.list("no_rope_layers", kind=int, default=default)

    def change(i: int, layer: Layer, attention: Attention) -> Layer:
        return replace(layer, mixer=replace(attention, window=seen[i], position=attention.position if rotated[i] else None))

    return _tied(config, change_layers(plain, change))


def starcoder2(config: Config) -> DecoderSpec:
    norm, bias = Norm("layer", config.number("norm_epsilon", default=1e-5), bias=True), config.flag("use_bias", default=True)
    config.ignore("mlp_type", "norm_type")

    def change(_: int, layer: Layer, attention: Attention) -> Layer:
        ff = replace(_plain(layer), up_bias=bias, down_bias=bias)
        return Layer(replace(attention, qkv_bias=bias, out_bias=bias), ff, norm, ff_in=norm)

    return replace(_tied(config, change_layers(llama.spec(config), change)), norm=norm)


def stablelm(config: Config) -> DecoderSpec:
    eps = config.number("layer_norm_eps", default=1e-5)
    normed = QkNorm(Norm("layer", eps), "each") if config.flag("qk_layernorm", default=False) else None
    norm, bias = Norm("layer", eps, bias=True), config.flag("use_qkv_bias", default=False)
    parallel = config.flag("use_parallel_residual", default=False)
    made = Layer(None, None, norm, residual=Residual.PARALLEL) if parallel else Layer(None, None, norm, ff_in=norm)

    def change(_: int, layer: Layer, attention: Attention) -> Layer:
        return replace(made, mixer=replace(attention, qkv_bias=bias, qk_norm=normed), feed_forward=layer.feed_forward)

    return replace(change_layers(llama.spec(config), change), norm=norm)


def baichuan(config: Config) -> DecoderSpec:
    """A configuration with rotary positions says `max_position_embeddings`, one with linear biases only `model_max_length`."""
    config.ignore("z_loss_weight", "_from_model_config", "model_max_length")
    if config.has("max_position_embeddings"):
        return llama.spec(config)
    longest = {"max_position_embeddings": config.integer("model_max_length", default=4096)}
    return with_attention(llama.spec(config.having(longest)), position=Alibi())


def _tied(config: Config, plain: DecoderSpec) -> DecoderSpec:
    """Its head is tied where the configuration is silent."""
    return replace(plain, head=replace(plain.head, tied=config.flag("tie_word_embeddings", default=True)))


def _layer_normed(config: Config, norm: Norm) -> DecoderSpec:
    """Layer norms, plain feed-forwards."""
    changed = change_layers(llama.spec(config), lambda _, layer, attention: Layer(attention, _plain(layer), norm, ff_in=norm))
    return replace(changed, norm=norm)


def _plain(layer: Layer) -> Mlp:
    assert isinstance(layer.feed_forward, Mlp)
    return replace(layer.feed_forward, gated=False)


HUNYUAN = {"self_attn.query_layernorm": "mixer.q_norm", "self_attn.key_layernorm": "mixer.k_norm"}
_STARCODER2, _NANOCHAT = {"ff.c": "ff.down", "mlp.c_fc": "ff.up"}, {"mlp.fc1": "ff.up", "mlp.fc2": "ff.down"}
_HYPERCLOVA = {"input_layernorm": "mixer_in", "post_norm1": "mixer_out", "post_attention_layernorm": "ff_in", "post_norm2": "ff_out"}


def _apertus_rules(spec: DecoderSpec) -> tuple[Rule, ...]:
    slots = {"attention_layernorm": "mixer_in", "feedforward_layernorm": "ff_in"}
    return (*llama_rules(spec.head.tied, slots), Rename("layers.{i}.mlp.act_fn.{n}", "layers.{i}.ff.act.{n}"))


def _stablelm_rules(spec: DecoderSpec) -> tuple[Rule, ...]:
    attention = attention_of(spec)
    counts = {"q": attention.heads, "k": attention.kv_heads}
    norms = "layers.{i}.self_attn.%s_layernorm.norms.{h}.weight"
    return (*plain_names(spec), *(Stack(norms % p, f"layers.{{i}}.mixer.{p}_norm.weight", "h", n) for p, n in counts.items()))


BAICHUAN_2 = 125696
"""Its vocabulary, the only thing that tells it from the first; it has unit rows in its head."""


def _baichuan_rules(spec: DecoderSpec) -> tuple[Rule, ...]:
    unit = (UnitRows("lm_head.weight"),) if spec.vocab == BAICHUAN_2 else ()
    return (*unit, split("model.layers.{i}.self_attn.W_pack", "layers.{i}.mixer", "qkv"), *plain_names(spec))


LLAMA_KIN = (
    Family("baichuan", ("BaichuanForCausalLM", "BaiChuanForCausalLM"), ("baichuan",), baichuan, _baichuan_rules),
    Family("smollm3", ("SmolLM3ForCausalLM",), ("smollm3",), smollm3, plain_names),
    Family("stablelm", ("StableLmForCausalLM", "StableLMEpochForCausalLM"), ("stablelm", "stablelm_epoch"), stablelm, _stablelm_rules),
    Family(
        "starcoder2",
        ("Starcoder2ForCausalLM",),
        ("starcoder2",),
        starcoder2,
        partial(plain_names, names=_STARCODER2),
    ),
    Family("apertus", ("ApertusForCausalLM",), ("apertus",), apertus, _apertus_rules),
    Family(
        "nanochat",
        ("NanoChatForCausalLM",),
        ("nanochat",),
        nanochat,
        partial(plain_names, names=_NANOCHAT),
    ),
    Family("helium", ("HeliumForCausalLM",), ("helium",), helium, plain_names),
    Family("arcee", ("ArceeForCausalLM",), ("arcee",), arcee, plain_names),
    Family("ernie4_5", ("Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM"), ("ernie4_5",), ernie, plain_names),
    Family("seed_oss", ("SeedOssForCausalLM",), ("seed_oss",), seed_oss, plain_names),
    Family("nemotron", ("NemotronForCausalLM",), ("nemotron",), nemotron, plain_names),
    Family("hunyuan_v1_dense", ("HunYuanDenseV1ForCausalLM",), ("hunyuan_v1_dense",), hunyuan, partial(plain_names, names=HUNYUAN)),
    Family("jais2", ("Jais2ForCausalLM",), ("jais2",), jais2, plain_names),
    Family("internlm3", ("InternLM3ForCausalLM",), ("internlm3",), internlm3, plain_names),
    Family("hyperclovax", ("HyperCLOVAXForCausalLM",), ("hyperclovax",), hyperclova, partial(plain_names, norms=_HYPERCLOVA)),
    Family("exaone4", ("Exaone4ForCausalLM",), ("exaone4",), exaone4, partial(plain_names, norms=AFTER)),
)
