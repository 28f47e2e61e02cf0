"""Zamba 2: Mamba 2 layers, some of which first read a block of attention that they share."""

from __future__ import annotations

from pagoda.models.checkpoint import Drop, Rename, Rule, Split
from pagoda.models.config import Config
from pagoda.models.families.common import activation, decoder, llama_rules, rms, rope, split
from pagoda.models.families.recurrent_common import first_of, layer_kinds, ssd_rules
from pagoda.models.family import Family, LeftToTransformers
from pagoda.models.recurrent import Conv, GatedNorm, Ssd
from pagoda.models.spec import Attention, DecoderSpec, Layer, Mlp, Norm, Shared

LINEAR, HYBRID = "linear_attention", "hybrid"


def zamba2(config: Config) -> DecoderSpec:
    width, count, norm = config.integer("hidden_size"), config.integer("num_hidden_layers"), rms(config)
    config.ignore(
        "attention_hidden_size", "chunk_size", "hybrid_layer_ids", "kv_channels", "num_query_groups", "time_step_floor", "time_step_max",
        "use_conv_bias", "use_mamba_kernels", "use_mem_eff_path",
    )  # fmt: skip
    if config.flag("use_long_context", default=False):
        raise LeftToTransformers("Zamba 2 with use_long_context rescales its rotation in a way that no family here has")
    ssd, attention = _ssd(config, width), _attention(config, width)
    bias = config.flag("add_bias_linear", default=False)
    ff = Mlp(config.integer("intermediate_size", default=4 * width), activation(config, "hidden_act", default="gelu"), True, bias, bias)
    rank, adapted = config.integer("adapter_rank", default=128), config.flag("use_shared_attention_adapter", default=False)
    uses, blocks = iter(range(count)), max(config.integer("num_mem_blocks", default=1), 1)
    layers = tuple(
        Layer(Shared(attention, ssd, next(uses) % blocks, ff, norm, rank, adapted), None)
        if kind == HYBRID
        else Layer(ssd, None, mixer_in=norm)
        for kind in layer_kinds(config, count, (LINEAR, HYBRID), "layers_block_type", "layer_types", named={"mamba": LINEAR})
    )
    return decoder(config, width, layers, norm, config.integer("max_position_embeddings", default=4096), tied=True)


def _attention(config: Config, width: int) -> Attention:
    heads = config.integer("num_attention_heads")
    dim = config.integer("attention_head_dim", "head_dim", default=2 * width // heads)
    turned = rope(config, dim)
    position = turned if config.flag("use_mem_rope", default=False) else None
    return Attention(heads, config.integer("num_key_value_heads", default=heads), dim, (dim / 2) ** -0.5, position)


def _ssd(config: Config, width: int) -> Ssd:
    heads, groups = config.integer("n_mamba_heads", default=8), config.integer("mamba_ngroups", default=1)
    return Ssd(
        heads,
        config.integer("mamba_headdim", default=config.integer("mamba_expand", default=2) * width // heads),
        groups,
        config.integer("mamba_d_state", default=64),
        Conv(config.integer("mamba_d_conv", default=4), True),
        GatedNorm(Norm("rms", 1e-5), groups, gate_first=True),
        (config.number("time_step_min", default=0.001), float("inf")),
        config.flag("add_bias_linear", default=False),
    )


def zamba2_rules(spec: DecoderSpec) -> tuple[Rule, ...]:
    uses = [(i, layer.mixer) for i, layer in enumerate(spec.layers) if isinstance(layer.mixer, Shared)]
    ssd, first = first_of(spec, Ssd), dict[int, int]()
    for i, mixer in uses:
        first.setdefault(mixer.block, i)
    held = {f"layers.{i}.shared_transformer": f"shared.{block}" for block, i in first.items()}
    return (
        Rename("model.final_layernorm.{t}", "model.norm.{t}"),
        *llama_rules(spec.head.tied, {"input_layernorm": "mixer_in"}),
        *(rule for use, (i, mixer) in enumerate(uses) for rule in _adapter(use, first[mixer.block], f"layers.{i}.mixer", mixer)),
        *(rule for at, to in held.items() for rule in _block(at, to)),
        Drop("layers.{i}.shared_transformer.{x*}"),
        Rename("layers.{i}.linear.{t}", "layers.{i}.mixer.into.{t}"),
        Rename("layers.{i}.mamba_decoder.input_layernorm.{t}", "layers.{i}.mixer.inner.{t}"),
        *ssd_rules(ssd, "layers.{i}.mamba_decoder.mamba", "layers.{i}.mixer.recurrent"),
        *ssd_rules(ssd, "layers.{i}.mamba"),
    )


def _block(at: str, to: str) -> tuple[Rule, ...]:
    return (
        Rename(f"{at}.self_attn.{{p}}_proj.{{t}}", f"{to}.attention.{{p}}.{{t}}"),
        split(f"{at}.feed_forward.gate_up_proj", f"{to}.ff", ("gate", "up")),
        Rename(f"{at}.feed_forward.down_proj.{{t}}", f"{to}.ff.down.{{t}}"),
        Rename(f"{at}.input_layernorm.{{t}}", f"{to}.norm.{{t}}"),
        Rename(f"{at}.pre_ff_layernorm.{{t}}", f"{to}.ff_norm.{{t}}"),
    )


def _adapter(use: int, first: int, to: str, mixer: Shared) -> tuple[Rule, ...]:
    """What one use adds to the block, which lies with the block's first layer."""
    ff = f"layers.{first}.shared_transformer.feed_forward.gate_up_proj_adapter_list.{use}"
    rules: list[Rule] = [
        Rename(f"{ff}.0.{{t}}", f"{to}.gate_down.{{t}}"),
        Split(f"{ff}.1.{{t}}", (f"{to}.gate_add.{{t}}", f"{to}.up_add.{{t}}")),
    ]
    for name in "qkv" if mixer.adapted else "":
        own = f"layers.{first}.shared_transformer.self_attn.linear_{name}_adapter_list.{use}"
        rules += [Rename(f"{own}.0.{{t}}", f"{to}.{name}_down.{{t}}"), Rename(f"{own}.1.{{t}}", f"{to}.{name}_add.{{t}}")]
    return tuple(rules)


ZAMBA2 = Family("zamba2", ("Zamba2ForCausalLM",), ("zamba2",), zamba2, zamba2_rules)
