"""Decoders whose experts lie in files of their own shape: Mellum, DBRX, Hy 3, Aria, Granite with shared experts or sinks."""

from __future__ import annotations

from dataclasses import replace

from pagoda.models.checkpoint import Drop, Rename, Rule, Split, Stack, Transpose
from pagoda.models.config import Config
from pagoda.models.families import granite, llama
from pagoda.models.families.common import (
    activation,
    body_names,
    change_layers,
    correction,
    decoder,
    experts_of,
    mlp_of,
    moe_names,
    plain_names,
    rms,
    rope,
    sparse,
    sparse_names,
    split,
    with_attention,
)
from pagoda.models.families.routed import dense_layers
from pagoda.models.family import Family
from pagoda.models.rope import Rope
from pagoda.models.spec import Attention, DecoderSpec, Layer, Mlp, Moe, Norm, QkNorm, Router


def mellum(config: Config) -> DecoderSpec:
    """Sliding and full layers turn at speeds of their own."""
    plain, normed = llama.spec(config), QkNorm(rms(config))

    def change(_: int, layer: Layer, attention: Attention) -> Layer:
        part = "sliding_attention" if attention.window else "full_attention"
        position = rope(config, attention.head_dim, part=part)
        return replace(layer, mixer=replace(attention, position=position, qk_norm=normed))

    _read_both(config)
    router = Router("softmax", renormalize=config.flag("norm_topk_prob", default=False))
    moe = experts_of(config, plain, router, config.integer("moe_intermediate_size"))
    return sparse(change_layers(plain, change), moe, dense_layers(config, len(plain.layers)))


def hy3(config: Config) -> DecoderSpec:
    config.ignore("enable_moe_fp32_combine", "first_k_dense_replace")
    plain = with_attention(llama.spec(config), qk_norm=QkNorm(rms(config)))
    hidden, act = config.integer("moe_intermediate_size"), mlp_of(plain).activation
    router = Router("sigmoid", renormalize=True, correction=True, scale=config.number("router_scaling_factor", default=1.0))
    shared = Mlp(hidden * config.integer("num_shared_experts", default=1), act)
    moe = experts_of(config, plain, router, hidden, shared)
    return sparse(plain, moe, dense_layers(config, len(plain.layers)))


def aria(config: Config) -> DecoderSpec:
    plain = llama.spec(config)
    mlp = mlp_of(plain)
    shared = replace(mlp, hidden=mlp.hidden * config.integer("moe_num_shared_experts", default=2))
    return sparse(plain, experts_of(config, plain, Router("softmax_after"), shared=shared))


def granite_shared(config: Config) -> DecoderSpec:
    return granite.moe(config, config.integer("shared_intermediate_size", default=0))


def granite_swa(config: Config) -> DecoderSpec:
    return _sinks(config, granite.spec(config))


def granite_moe_swa(config: Config) -> DecoderSpec:
    config.require("shared_intermediate_size", 0, default=0)
    return _sinks(config, granite.moe(config))


def dbrx(config: Config) -> DecoderSpec:
    width, heads, positions = config.integer("d_model"), config.integer("n_heads"), config.integer("max_seq_len")
    own, experts = config.child("attn_config"), config.child("ffn_config")
    assert own is not None and experts is not None
    experts.require("moe_normalize_expert_weights", 1, 1.0, default=1)
    experts.ignore("moe_jitter_eps", "moe_loss_weight", "hidden_size")
    config.ignore("num_key_value_heads")
    dim, norm = width // heads, Norm("layer", 1e-5)
    position = rope(config, dim, theta=own.number("rope_theta", default=10000.0))
    attention = Attention(heads, own.integer("kv_n_heads"), dim, dim**-0.5, position, clip=own.number("clip_qkv", default=None))
    act = experts.child("ffn_act_fn")
    router = Router("softmax", renormalize=True)
    count, chosen, hidden = (experts.integer(name) for name in ("moe_num_experts", "moe_top_k", "ffn_hidden_size"))
    moe = Moe(count, chosen, hidden, router, activation(act, "name") if act else "silu")
    return decoder(config, width, (Layer(attention, moe, norm, ff_in=norm),) * config.integer("n_layers"), norm, positions)


def _read_both(config: Config) -> None:
    """A model of one kind of layer still lists the rope of the other."""
    for part in ("sliding_attention", "full_attention"):
        rope(config, 2, part=part)


def _sinks(config: Config, plain: DecoderSpec) -> DecoderSpec:
    thetas = config.list("layer_rope_theta", kind=(int, float), default=None)

    def change(i: int, layer: Layer, attention: Attention) -> Layer:
        position = attention.position
        if thetas is not None and isinstance(position, Rope):
            position = replace(position, theta=float(thetas[i])) if thetas[i] else None
        return replace(layer, mixer=replace(attention, sinks=True, position=position))

    return change_layers(plain, change)


def _hy3_names(spec: DecoderSpec) -> tuple[Rule, ...]:
    ahead = Drop(f"model.layers.{len(spec.layers)}.{{x*}}")
    return (ahead, *plain_names(spec), correction("mlp.expert_bias"), *moe_names(spec, router="router.gate", shared="shared_mlp"))


def _aria_names(spec: DecoderSpec) -> tuple[Rule, ...]:
    block = "layers.{i}.mlp"
    return (
        *plain_names(spec),
        Rename(f"{block}.router.{{t}}", "layers.{i}.ff.router.{t}"),
        Rename(f"{block}.shared_experts.{{p}}_proj.{{t}}", "layers.{i}.ff.shared.{p}.{t}"),
        *(Transpose(f"{block}.experts.{name}.weight") for name in ("fc1", "fc2")),
        split(f"{block}.experts.fc1", "layers.{i}.ff.experts", ("gate", "up"), dim=1),
        Rename(f"{block}.experts.fc2.weight", "layers.{i}.ff.experts.down.weight"),
    )


def _shared_names(spec: DecoderSpec) -> tuple[Rule, ...]:
    return (*granite.moe_rules(spec), *granite.shared_names("layers.{i}.ff.shared"))


def _swa_names(spec: DecoderSpec) -> tuple[Rule, ...]:
    return (*plain_names(spec), Rename("layers.{i}.self_attn.sinks", "layers.{i}.mixer.sinks"))


def _moe_swa_names(spec: DecoderSpec) -> tuple[Rule, ...]:
    block = "layers.{i}.block_sparse_moe"
    return (
        *_swa_names(spec),
        Split(f"{block}.experts.gate_up_proj", tuple(f"layers.{{i}}.ff.experts.{part}.weight" for part in ("gate", "up")), dim=1),
        Rename(f"{block}.experts.down_proj", "layers.{i}.ff.experts.down.weight"),
        Rename(f"{block}.router.{{t}}", "layers.{i}.ff.router.{t}"),
    )


def _dbrx_names(spec: DecoderSpec) -> tuple[Rule, ...]:
    attention, moe = spec.layers[0].mixer, spec.layers[0].feed_forward
    assert isinstance(attention, Attention) and isinstance(moe, Moe)
    q, kv = attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim
    own, block = "layers.{i}.norm_attn_norm", "layers.{i}.ffn.experts.mlp"
    return (
        *body_names(spec, "transformer.wte", "transformer.norm_f", "transformer.blocks", {}),
        split(f"{own}.attn.Wqkv", "layers.{i}.mixer", "qkv", (q, kv, kv)),
        Rename(f"{own}.attn.out_proj.{{t}}", "layers.{i}.mixer.o.{t}"),
        Rename(f"{own}.norm_1.{{t}}", "layers.{i}.mixer_in.{t}"),
        Rename(f"{own}.norm_2.{{t}}", "layers.{i}.ff_in.{t}"),
        Rename("layers.{i}.ffn.router.layer.{t}", "layers.{i}.ff.router.{t}"),
        *(
            rule
            for theirs, ours in {"w1": "gate", "v1": "up", "w2": "down"}.items()
            for rule in (
                Split(f"{block}.{theirs}", tuple(f"{block}.{theirs}.{e}" for e in range(moe.experts))),
                Stack(f"{block}.{theirs}.{{e}}", f"layers.{{i}}.ff.experts.{ours}.weight", "e", moe.experts),
            )
        ),
        Transpose("layers.{i}.ff.experts.down.weight"),
    )


EXPERT_KIN = (
    Family("mellum", ("MellumForCausalLM",), ("mellum",), mellum, sparse_names),
    Family("hy_v3", ("HYV3ForCausalLM",), ("hy_v3",), hy3, _hy3_names),
    Family("aria_text", ("AriaTextForCausalLM",), ("aria_text",), aria, _aria_names),
    Family("granitemoeshared", ("GraniteMoeSharedForCausalLM",), ("granitemoeshared",), granite_shared, _shared_names),
    Family("granite_swa", ("GraniteSWAForCausalLM",), ("granite_swa",), granite_swa, _swa_names),
    Family("granitemoe_swa", ("GraniteMoeSWAForCausalLM",), ("granitemoe_swa",), granite_moe_swa, _moe_swa_names),
    Family("dbrx", ("DbrxForCausalLM",), ("dbrx",), dbrx, _dbrx_names),
)
