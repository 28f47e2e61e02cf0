"""Mamba 2 beside attention: Bamba, Granite 4 (hybrid), Nemotron-H, Falcon-H1."""

from __future__ import annotations

from dataclasses import replace

from pagoda.models.checkpoint import Rename, Rule
from pagoda.models.config import Config
from pagoda.models.families.common import (
    PROJECTIONS,
    Heads,
    activation,
    body_names,
    correction,
    decoder,
    max_positions,
    moe_names,
    plain_mlp,
    plain_names,
    renamed,
    rms,
    rope,
)
from pagoda.models.families.granite import expert_names, shared_names
from pagoda.models.families.mamba import step_limits
from pagoda.models.families.recurrent_common import ENDLESS, first_of, hybrid_names, layer_kinds, ssd_rules
from pagoda.models.families.routed import grouped_router
from pagoda.models.family import Family
from pagoda.models.recurrent import Conv, GatedNorm, Ssd
from pagoda.models.rope import Rope
from pagoda.models.spec import Attention, Both, DecoderSpec, Embed, Layer, Mlp, Moe, Norm, Router

LINEAR, FULL = "linear_attention", "full_attention"
_NAMED = {"mamba": LINEAR, "attention": FULL}


def _ssd(config: Config, width: int) -> Ssd:
    """The mixer as Bamba and its kin spell it."""
    heads, groups = config.integer("mamba_n_heads"), config.integer("mamba_n_groups", default=1)
    head_dim = config.values.get("mamba_d_head")
    inner = config.integer("mamba_d_ssm", default=config.integer("mamba_expand", default=2) * width)
    config.ignore("mamba_d_head", "mamba_expand", "mamba_chunk_size", "time_step_min", "time_step_max", "time_step_floor")
    return Ssd(
        heads,
        head_dim if isinstance(head_dim, int) else inner // heads,
        groups,
        config.integer("mamba_d_state"),
        Conv(config.integer("mamba_d_conv", default=4), config.flag("mamba_conv_bias", default=True)),
        GatedNorm(rms(config), groups, gate_first=True),
        step_limits(config),
        config.flag("mamba_proj_bias", default=False),
    )


def _attention(config: Config, width: int, position: Rope | None) -> Attention:
    return Heads.read(config, width).attention(position, config.flag("attention_bias", default=False))


def _spec(config: Config, width: int, layers: tuple[Layer, ...], norm: Norm) -> DecoderSpec:
    return decoder(config, width, layers, norm, config.integer("max_position_embeddings", default=ENDLESS))


def bamba(config: Config) -> DecoderSpec:
    width, count, norm = config.integer("hidden_size"), config.integer("num_hidden_layers"), rms(config)
    bias = config.flag("mlp_bias", default=False)
    mlp = Mlp(config.integer("intermediate_size"), activation(config, "hidden_act"), up_bias=bias, down_bias=bias)
    position = rope(config, Heads.read(config, width).head_dim)
    mixers = {LINEAR: _ssd(config, width), FULL: _attention(config, width, position)}
    attending = config.list("attn_layer_indices", kind=int, default=())
    config.ignore("z_loss_coefficient", "attn_rotary_emb")
    kinds = layer_kinds(config, count, (LINEAR, FULL), default=[FULL if i in attending else LINEAR for i in range(count)])
    return _spec(config, width, tuple(Layer(mixers[kind], mlp, mixer_in=norm, ff_in=norm) for kind in kinds), norm)


def granite_hybrid(config: Config) -> DecoderSpec:
    width, count, norm = config.integer("hidden_size"), config.integer("num_hidden_layers"), rms(config)
    act, scale = activation(config, "hidden_act"), config.number("residual_multiplier", default=1.0)
    position = rope(config, Heads.read(config, width).head_dim)
    turns = config.text("position_embedding_type", default=None) == "rope"
    attention = _attention(config, width, position if turns else None)
    attention = replace(attention, scale=config.number("attention_multiplier", default=1.0))
    experts, shared = config.integer("num_local_experts", default=0), Mlp(config.integer("shared_intermediate_size"), act)
    hidden, top_k = config.integer("intermediate_size"), config.integer("num_experts_per_tok", default=0)
    moe = Moe(experts, top_k, hidden, Router("softmax_after"), act, shared) if experts else shared
    mixers = {LINEAR: _ssd(config, width), FULL: attention}
    kinds = layer_kinds(config, count, (LINEAR, FULL), "layer_types", "layers_block_type", named=_NAMED)
    layers = tuple(Layer(mixers[kind], moe, mixer_in=norm, ff_in=norm, scale=scale) for kind in kinds)
    plain = _spec(config, width, layers, norm)
    head = replace(plain.head, scale=1 / config.number("logits_scaling", default=1.0))
    return replace(plain, embed=Embed(scale=config.number("embedding_multiplier", default=1.0)), head=head)


def nemotron_h(config: Config) -> DecoderSpec:
    width = config.integer("hidden_size")
    norm = Norm("rms", config.number("layer_norm_epsilon", "rms_norm_eps", default=1e-5))
    heads, groups = config.integer("mamba_num_heads"), config.integer("n_groups", default=8)
    config.require("mamba_hidden_act", "silu", default="silu")
    conv = Conv(config.integer("conv_kernel", default=4), config.flag("use_conv_bias", default=True))
    ssd = Ssd(
        heads,
        config.integer("mamba_head_dim"),
        groups,
        config.integer("ssm_state_size"),
        conv,
        GatedNorm(norm, groups, gate_first=True),
        (config.number("time_step_min", default=0.001), float("inf")),
        config.flag("mamba_proj_bias", "use_bias", default=False),
    )
    config.ignore(
        "use_bias", "expand", "chunk_size", "time_step_limit", "time_step_max", "time_step_floor", "residual_in_fp32",
        "use_mamba_kernels", "rescale_prenorm_residual", "mamba_ssm_cache_dtype", "mtp_layers_block_type", "moe_shared_expert_overlap",
        "sliding_window", "rope_theta", "partial_rotary_factor", "num_hidden_layers",
    )  # fmt: skip
    attention, mlp, moe = _attention(config, width, None), *_nemotron_ff(config)
    made = {
        LINEAR: Layer(ssd, None, mixer_in=norm),
        FULL: Layer(attention, None, mixer_in=norm),
        "mlp": Layer(None, mlp, ff_in=norm),
        "moe": Layer(None, moe, ff_in=norm),
    }
    return _spec(config, width, tuple(made[kind] for kind in _nemotron_kinds(config)), norm)


def _nemotron_kinds(config: Config) -> tuple[str, ...]:
    """A list of names, or a letter a layer."""
    letters = {"M": LINEAR, "*": FULL, "-": "mlp", "E": "moe"}
    pattern = config.text("hybrid_override_pattern", default="")
    default = [letters.get(letter, letter) for letter in pattern]
    return layer_kinds(config, None, tuple(letters.values()), "layers_block_type", default=default, named=_NAMED)


def _nemotron_ff(config: Config) -> tuple[Mlp, Moe | None]:
    act, bias = activation(config, "mlp_hidden_act"), config.flag("mlp_bias", default=False)
    mlp = plain_mlp(config.integer("intermediate_size"), act, bias)
    experts = config.integer("n_routed_experts", default=0)
    config.require("moe_latent_size", None, default=None)
    config.ignore("n_shared_experts")
    top_k, hidden = config.integer("num_experts_per_tok", default=0), config.integer("moe_intermediate_size", default=0)
    shared = replace(mlp, hidden=config.integer("moe_shared_expert_intermediate_size", default=0))
    return mlp, Moe(experts, top_k, hidden, grouped_router(config), act, shared, gated=False) if experts else None


def falcon_h1(config: Config) -> DecoderSpec:
    width, count, norm = config.integer("hidden_size"), config.integer("num_hidden_layers"), rms(config)
    position = rope(config, Heads.read(config, width).head_dim)
    into, key = config.number("attention_in_multiplier", default=1.0), config.number("key_multiplier", default=1.0)
    attention = _attention(config, width, position)
    attention = replace(attention, scale=attention.scale * into * into * key)
    scales = (into * config.number("attention_out_multiplier", default=1.0), config.number("ssm_out_multiplier", default=1.0))
    if into != 1.0:
        config.require("attention_bias", False)
    bias, (gate, down) = config.flag("mlp_bias", default=False), config.list("mlp_multipliers", kind=(int, float), default=(1.0, 1.0))
    hidden, act = config.integer("intermediate_size"), activation(config, "hidden_act")
    mlp = Mlp(hidden, act, up_bias=bias, down_bias=bias, gate_scale=gate, scale=down)
    layer = Layer(Both(attention, _falcon_ssd(config, width), scales), mlp, mixer_in=norm, ff_in=norm)
    plain = _spec(config, width, (layer,) * count, norm)
    head = replace(plain.head, scale=config.number("lm_head_multiplier", default=1.0))
    longest = max_positions(config, position.scaling)
    return replace(plain, embed=Embed(scale=config.number("embedding_multiplier", default=1.0)), head=head, max_positions=longest)


def _falcon_ssd(config: Config, width: int) -> Ssd:
    ssd = _ssd(config, width)
    into = config.number("ssm_in_multiplier", default=1.0)
    if into != 1.0:
        config.require("mamba_proj_bias", False)
    scales = tuple(into * scale for scale in config.list("ssm_multipliers", kind=(int, float), default=(1.0,) * 5))
    first, normed = not config.flag("mamba_norm_before_gate", default=True), config.flag("mamba_rms_norm", default=False)
    config.require("projectors_bias", False, default=False)
    config.ignore("mamba_use_mlp")
    norm = GatedNorm(rms(config), ssd.groups, gate_first=first) if normed else None
    z, x, b, c, step = scales
    return replace(ssd, norm=norm, scales=None if set(scales) == {1.0} else (z, x, b, c, step))


def bamba_rules(spec: DecoderSpec) -> tuple[Rule, ...]:
    return (*hybrid_names(spec), *ssd_rules(first_of(spec, Ssd), "layers.{i}.mamba"))


def falcon_h1_rules(spec: DecoderSpec) -> tuple[Rule, ...]:
    return (
        *hybrid_names(spec),
        *renamed({f"mixer.{part}": f"mixer.attention.{part}" for part in "qkvo"}),
        *ssd_rules(first_of(spec, Ssd), "layers.{i}.mamba", "layers.{i}.mixer.recurrent"),
    )


def granite_hybrid_rules(spec: DecoderSpec) -> tuple[Rule, ...]:
    routed = isinstance(spec.layers[0].feed_forward, Moe)
    return (
        *plain_names(spec),
        *(expert_names() if routed else ()),
        *shared_names("layers.{i}.ff.shared" if routed else "layers.{i}.ff"),
        *ssd_rules(first_of(spec, Ssd), "layers.{i}.mamba"),
    )


def nemotron_h_rules(spec: DecoderSpec) -> tuple[Rule, ...]:
    parts = list(body_names(spec, "backbone.embeddings", "backbone.norm_f", "backbone.layers", {}))
    for i, layer in enumerate(spec.layers):
        at = f"layers.{i}"
        parts.append(Rename(f"{at}.norm.{{t}}", f"{at}.{'ff_in' if layer.mixer is None else 'mixer_in'}.{{t}}"))
        if isinstance(layer.mixer, Attention):
            parts += [Rename(f"{at}.mixer.{p}_proj.{{t}}", f"{at}.mixer.{p}.{{t}}") for p in "qkvo"]
        if isinstance(layer.feed_forward, Mlp):
            parts += [Rename(f"{at}.mixer.{p}_proj.{{t}}", f"{at}.ff.{p}.{{t}}") for p in ("up", "down")]
    sparse = any(isinstance(layer.feed_forward, Moe) for layer in spec.layers)
    return (*parts, *(_nemotron_experts(spec) if sparse else ()), *ssd_rules(first_of(spec, Ssd), "layers.{i}.mixer"))


def _nemotron_experts(spec: DecoderSpec) -> tuple[Rule, ...]:
    plain = {name: part for name, part in PROJECTIONS.items() if part != "gate"}
    return (correction("mixer.gate.e_score_correction_bias"), *moe_names(spec, "mixer", names=plain))


HYBRID_MAMBA = (
    Family("bamba", ("BambaForCausalLM",), ("bamba",), bamba, bamba_rules),
    Family("granitemoehybrid", ("GraniteMoeHybridForCausalLM",), ("granitemoehybrid",), granite_hybrid, granite_hybrid_rules),
    Family("nemotron_h", ("NemotronHForCausalLM",), ("nemotron_h",), nemotron_h, nemotron_h_rules),
    Family("falcon_h1", ("FalconH1ForCausalLM",), ("falcon_h1",), falcon_h1, falcon_h1_rules),
)
