"""AFMoE (Trinity): gated attention, positions where it slides, four norms, experts scored by sigmoids beside shared ones."""

from __future__ import annotations

from dataclasses import replace

from pagoda.models.checkpoint import Rule
from pagoda.models.config import Config
from pagoda.models.families import llama
from pagoda.models.families.common import change_layers, correction, experts_of, llama_rules, mlp_of, moe_names, rms, sparse
from pagoda.models.family import Family
from pagoda.models.spec import Attention, DecoderSpec, Embed, Layer, Moe, QkNorm, Router


def spec(config: Config) -> DecoderSpec:
    for name, value in {"score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1, "num_expert_groups": 1}.items():
        config.require(name, value, None)
    config.ignore("load_balance_coeff", "num_limited_groups", "use_grouped_mm", "num_expert_groups", "n_group", "topk_group")
    period, listed, norm = config.integer("global_attn_every_n_layers", default=4), config.has("layer_types"), rms(config, 1e-5)

    def change(i: int, layer: Layer, attention: Attention) -> Layer:
        window = attention.window if listed or (i + 1) % period else None
        position = attention.position if window else None
        mixer = replace(attention, window=window, position=position, qk_norm=QkNorm(norm), gated=True, out_bias=False)
        return Layer(mixer, layer.feed_forward, norm, norm, norm, norm)

    plain = change_layers(llama.spec(config), change)
    scale = plain.width**0.5 if config.flag("mup_enabled", default=False) else 1.0
    dense = range(config.integer("num_dense_layers", default=1))
    return replace(sparse(plain, _moe(config, plain), dense), embed=Embed(scale=scale), norm=norm)


def _moe(config: Config, plain: DecoderSpec) -> Moe:
    hidden, shared = config.integer("moe_intermediate_size"), config.integer("num_shared_experts", default=2)
    router = Router("sigmoid", renormalize=True, correction=True, scale=config.number("route_scale", default=1.0))
    return experts_of(config, plain, router, hidden, replace(mlp_of(plain), hidden=hidden * shared) if shared else None)


SLOTS = {
    "input_layernorm": "mixer_in", "post_attention_layernorm": "mixer_out", "pre_mlp_layernorm": "ff_in", "post_mlp_layernorm": "ff_out",
}  # fmt: skip


def rules(spec: DecoderSpec) -> tuple[Rule, ...]:
    return (*llama_rules(spec.head.tied, SLOTS), correction("mlp.expert_bias"), *moe_names(spec, router="router.gate"))


AFMOE = Family("afmoe", ("AfmoeForCausalLM",), ("afmoe",), spec, rules)
