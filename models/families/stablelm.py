"""StableLM: layer norms, partial rotation, optional parallel residual."""

from __future__ import annotations

from dataclasses import replace

from pagoda.models.checkpoint import Rule, Stack
from pagoda.models.config import Config
from pagoda.models.families import llama
from pagoda.models.families.common import attention_of, change_layers, llama_rules
from pagoda.models.family import Family
from pagoda.models.spec import Attention, DecoderSpec, Layer, Norm, QkNorm, Residual


def spec(config: Config) -> DecoderSpec:
    eps = config.number("layer_norm_eps", default=1e-5)
    normed = QkNorm(Norm("layer", eps), "each") if config.flag("qk_layernorm", default=False) else None
    norm = Norm("layer", eps, bias=True)
    bias, parallel = config.flag("use_qkv_bias", default=False), config.flag("use_parallel_residual", default=False)

    def change(_: int, layer: Layer, attention: Attention) -> Layer:
        mixer = replace(attention, qkv_bias=bias, qk_norm=normed)
        if parallel:
            return Layer(mixer, layer.feed_forward, norm, residual=Residual.PARALLEL)
        return Layer(mixer, layer.feed_forward, norm, ff_in=norm)

    return replace(change_layers(llama.spec(config), change), norm=norm)


def rules(spec: DecoderSpec) -> tuple[Rule, ...]:
    attention = attention_of(spec)
    counts = {"q": attention.heads, "k": attention.kv_heads}
    norms = "layers.{i}.self_attn.%s_layernorm.norms.{h}.weight"
    return (*llama_rules(spec.head.tied), *(Stack(norms % p, f"layers.{{i}}.mixer.{p}_norm.weight", "h", n) for p, n in counts.items()))


STABLELM = Family("stablelm", ("StableLmForCausalLM", "StableLMEpochForCausalLM"), ("stablelm", "stablelm_epoch"), spec, rules)
