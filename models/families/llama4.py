"""Llama 4 (text) and Ministral 3: queries sharpen with distance; Llama 4 sees chunks, skips rotation on some layers, has shared experts."""

from __future__ import annotations

from pagoda.hal.errors import ModelError
from pagoda.models.checkpoint import Rename, Rule, Split, Transpose
from pagoda.models.config import Config
from pagoda.models.families import llama
from pagoda.models.families.common import Heads, activation, decoder, max_positions, plain_names, rms, rope, with_attention
from pagoda.models.family import Family
from pagoda.models.spec import DecoderSpec, Layer, Mlp, Moe, Norm, QkNorm, Router, Temper, Window


def ministral3(config: Config) -> DecoderSpec:
    values = config.child("rope_parameters")
    if values is None:
        raise ModelError(f"{config.where} lacks rope_parameters, which this model type reads its scales from")
    values.ignore("max_position_embeddings")
    temper = Temper(values.number("llama_4_scaling_beta", default=0.0), values.integer("original_max_position_embeddings", default=16384))
    return with_attention(llama.spec(config), temper=temper)


def llama4(config: Config) -> DecoderSpec:
    width, count = config.integer("hidden_size"), config.integer("num_hidden_layers")
    heads, norm = Heads.read(config, width), rms(config, default=1e-5)
    position = rope(config, heads.head_dim, "interleaved", theta=500000.0)
    rotated, sparse = _rotated(config, count), _sparse_layers(config, count)
    act, hidden, bias = activation(config, "hidden_act"), config.integer("intermediate_size"), config.flag("attention_bias", default=False)
    dense = Mlp(config.integer("intermediate_size_mlp", default=hidden), act)
    experts, chosen = config.integer("num_local_experts"), config.integer("num_experts_per_tok", default=1)
    moe = Moe(experts, chosen, hidden, Router("sigmoid"), act, Mlp(hidden, act), scale_input=True)
    temper = Temper(config.number("attn_scale", default=0.1), config.number("floor_scale", default=8192), offset=1)
    tempered = config.flag("attn_temperature_tuning", default=True)
    normed = QkNorm(Norm("rms", norm.eps, weight=False), after_rope=True) if config.flag("use_qk_norm", default=True) else None
    chunk = Window("chunked", config.integer("attention_chunk_size", default=8192))
    turned = heads.attention(position, bias, window=chunk, qk_norm=normed)
    still = heads.attention(None, bias, temper=temper if tempered else None)
    layers = (Layer(turned if rotated[i] else still, moe if i in sparse else dense, mixer_in=norm, ff_in=norm) for i in range(count))
    return decoder(config, width, layers, norm, max_positions(config, position.scaling))


def _rotated(config: Config, count: int) -> tuple[int, ...]:
    """Layers that turn are those that see chunks."""
    every = config.integer("no_rope_layer_interval", default=4)
    rotated = config.list("no_rope_layers", kind=int, default=()) or tuple(int((i + 1) % every != 0) for i in range(count))
    kinds = config.list("layer_types", kind=str, default=tuple("chunked_attention" if turns else "full_attention" for turns in rotated))
    if kinds != tuple("chunked_attention" if turns else "full_attention" for turns in rotated):
        raise ModelError(f"{config.where}: layer_types and no_rope_layers disagree; layers that see chunks are those that turn")
    return rotated


def _sparse_layers(config: Config, count: int) -> tuple[int, ...]:
    step = config.integer("interleave_moe_layer_step", default=1)
    return config.list("moe_layers", kind=int, default=tuple(range(step - 1, count, step)))


def _llama4_names(spec: DecoderSpec) -> tuple[Rule, ...]:
    block = "layers.{i}.feed_forward"
    return (
        *plain_names(spec),
        Rename(f"{block}.{{p}}_proj.{{t}}", "layers.{i}.ff.{p}.{t}"),
        *(Transpose(f"{block}.experts.{name}") for name in ("gate_up_proj", "down_proj")),
        Split(f"{block}.experts.gate_up_proj", tuple(f"layers.{{i}}.ff.experts.{part}.weight" for part in ("gate", "up")), dim=1),
        Rename(f"{block}.experts.down_proj", "layers.{i}.ff.experts.down.weight"),
        Rename(f"{block}.router.{{t}}", "layers.{i}.ff.router.{t}"),
        Rename(f"{block}.shared_expert.{{p}}_proj.{{t}}", "layers.{i}.ff.shared.{p}.{t}"),
    )


LLAMA4 = (
    Family("llama4_text", ("Llama4ForCausalLM",), ("llama4_text",), llama4, _llama4_names),
    Family("ministral3", ("Ministral3ForCausalLM",), ("ministral3",), ministral3, plain_names),
)
