"""Delta rules beside attention: OLMo hybrid (Qwen3-Next's, projections apart), Kimi Linear (a decay per channel, latent attention)."""

from __future__ import annotations

from dataclasses import replace

from pagoda.models.checkpoint import Rename, Rule
from pagoda.models.config import Config
from pagoda.models.families.common import (
    MIXTRAL_NAMES,
    Heads,
    activation,
    correction,
    decoder,
    llama_rules,
    max_positions,
    moe_names,
    plain_names,
    renamed,
    rms,
    rope,
)
from pagoda.models.families.latent import latent_names, mla_of
from pagoda.models.families.qwen_next import FULL, LINEAR
from pagoda.models.families.recurrent_common import layer_kinds, rate_names
from pagoda.models.families.routed import grouped_router
from pagoda.models.family import Family
from pagoda.models.recurrent import Conv, GatedDelta, GatedNorm, KimiDelta
from pagoda.models.spec import DecoderSpec, Layer, Mlp, Moe, Norm, QkNorm


def olmo_hybrid(config: Config) -> DecoderSpec:
    width, count, norm = config.integer("hidden_size"), config.integer("num_hidden_layers"), rms(config)
    heads = Heads.read(config, width)
    turned = config.child("rope_parameters")
    position = rope(config, heads.head_dim) if turned is not None and turned.has("rope_theta") else None
    attention = heads.attention(position, config.flag("attention_bias", default=False), qk_norm=QkNorm(norm, "full"))
    mlp = Mlp(config.integer("intermediate_size"), activation(config, "hidden_act"))
    v_heads = config.integer("linear_num_value_heads", default=heads.heads)
    delta = GatedDelta(
        v_heads,
        config.integer("linear_num_key_heads", default=heads.heads),
        config.integer("linear_key_head_dim"),
        config.integer("linear_value_head_dim"),
        Conv(config.integer("linear_conv_kernel_dim", default=4)),
        GatedNorm(Norm("rms", 1e-5), v_heads, shared=True),
        double_beta=config.flag("linear_allow_neg_eigval", default=True),
    )
    config.ignore("linear_a_log_max", "linear_a_log_min", "linear_dt_init_floor", "linear_dt_max", "linear_dt_min", "linear_use_gate")
    kinds = layer_kinds(config, count, (LINEAR, FULL))
    made = {LINEAR: Layer(delta, mlp, mixer_in=norm, ff_in=norm), FULL: Layer(attention, mlp, mixer_out=norm, ff_out=norm)}
    return decoder(config, width, (made[kind] for kind in kinds), norm, max_positions(config, position.scaling if position else None))


def olmo_hybrid_rules(spec: DecoderSpec) -> tuple[Rule, ...]:
    names: list[Rule] = []
    for i, layer in enumerate(spec.layers):
        at, delta = f"layers.{i}", isinstance(layer.mixer, GatedDelta)
        slots = {"attention_layer_norm": "mixer_in", "feedforward_layer_norm": "ff_in"}
        if not delta:
            slots = {"feedforward_layer_norm": "mixer_out", "post_feedforward_layernorm": "ff_out"}
        names += renamed(slots, at, at)
    return (*llama_rules(spec.head.tied, {}), *names, *_apart("layers.{i}.linear_attn"))


def _apart(at: str) -> tuple[Rule, ...]:
    """The delta rule's tensors, each projection and convolution by itself."""
    to = "layers.{i}.mixer"
    names = {**MIXED, "b": "beta", "a": "step", "g": "z", "o": "out"}
    return (
        *(Rename(f"{at}.{theirs}_proj.{{t}}", f"{to}.{ours}.{{t}}") for theirs, ours in names.items()),
        *_convolved(at, to),
        Rename(f"{at}.o_norm.{{t}}", f"{to}.norm.{{t}}"),
    )


MIXED = {"q": "query", "k": "key", "v": "value"}


def _convolved(at: str, to: str) -> tuple[Rule, ...]:
    """Convolutions of q, k and v, and the rates of decay."""
    return (*(Rename(f"{at}.{theirs}_conv1d.{{t}}", f"{to}.conv.{ours}.{{t}}") for theirs, ours in MIXED.items()), *rate_names(at, to))


def kimi_linear(config: Config) -> DecoderSpec:
    width, count, norm = config.integer("hidden_size"), config.integer("num_hidden_layers"), rms(config, 1e-5)
    mla = replace(mla_of(config, width), position=None)
    delta_heads, dim = config.integer("linear_num_heads"), config.integer("linear_head_dim")
    conv = Conv(config.integer("linear_conv_kernel_dim", default=4))
    delta = KimiDelta(delta_heads, dim, conv, GatedNorm(norm, delta_heads, "sigmoid", shared=True))
    config.ignore("head_dim", "qk_head_dim", "num_key_value_heads", "rope_parameters", "rope_theta")
    mixers = {LINEAR: delta, FULL: mla}
    kinds, ff = layer_kinds(config, count, (LINEAR, FULL)), _kimi_ff(config, count)
    layers = (Layer(mixers[kind], ff[i], mixer_in=norm, ff_in=norm) for i, kind in enumerate(kinds))
    return decoder(config, width, layers, norm, config.integer("model_max_length", "max_position_embeddings", default=131072))


def _kimi_ff(config: Config, count: int) -> list[Mlp | Moe]:
    act, hidden = activation(config, "hidden_act"), config.integer("moe_intermediate_size")
    shared = Mlp(hidden * config.integer("num_shared_experts", "n_shared_experts", default=1), act)
    top_k = config.integer("num_experts_per_token", "num_experts_per_tok")
    moe = Moe(config.integer("num_experts"), top_k, hidden, grouped_router(config), act, shared)
    mlp = Mlp(config.integer("intermediate_size"), act)
    kinds = layer_kinds(config, count, ("dense", "sparse"), "mlp_layer_types")
    return [moe if kind == "sparse" else mlp for kind in kinds]


def kimi_linear_rules(spec: DecoderSpec) -> tuple[Rule, ...]:
    names: list[Rule] = []
    for i, layer in enumerate(spec.layers):
        names += _kimi_delta(i) if isinstance(layer.mixer, KimiDelta) else ()
        if isinstance(layer.feed_forward, Mlp):
            names.append(Rename(f"layers.{i}.block_sparse_moe.{{p}}_proj.{{t}}", f"layers.{i}.ff.{{p}}.{{t}}"))
    block = "block_sparse_moe"
    return (
        *plain_names(spec),
        *names,
        *latent_names(spec),
        correction(f"{block}.gate.e_score_correction_bias"),
        *moe_names(spec, block, names=MIXTRAL_NAMES),
    )


def _kimi_delta(i: int) -> tuple[Rule, ...]:
    at, to = f"layers.{i}.self_attn", f"layers.{i}.mixer"
    inner = {"b": "beta", "f_a": "decay_down", "f_b": "decay", "g_a": "gate_down", "g_b": "gate", "o": "out", "o_norm": "norm"}
    return (*renamed({**MIXED, **inner}, to, to), *_convolved(at, to))


DELTA_KIN = (
    Family("olmo_hybrid", ("OlmoHybridForCausalLM",), ("olmo_hybrid",), olmo_hybrid, olmo_hybrid_rules),
    Family("kimi_linear", ("KimiLinearForCausalLM",), ("kimi_linear",), kimi_linear, kimi_linear_rules),
)
