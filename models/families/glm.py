"""GLM 4 (2024) and GLM-4-0414: half of each head turns in pairs, gate and up stored fused; the later one has sandwich norms."""

from __future__ import annotations

from dataclasses import replace

from pagoda.models.checkpoint import Rule
from pagoda.models.config import Config
from pagoda.models.families import llama
from pagoda.models.families.common import change_layers, llama_rules, rms, split, with_attention
from pagoda.models.family import Family
from pagoda.models.spec import DecoderSpec

SANDWICH = {
    "input_layernorm": "mixer_in",
    "post_self_attn_layernorm": "mixer_out",
    "post_attention_layernorm": "ff_in",
    "post_mlp_layernorm": "ff_out",
}


def glm(config: Config) -> DecoderSpec:
    return with_attention(llama.spec(config, "interleaved"), out_bias=False)


def glm4(config: Config) -> DecoderSpec:
    norm = rms(config)
    return change_layers(glm(config), lambda _, layer, attention: replace(layer, mixer_out=norm, ff_out=norm))


def glm4v(config: Config) -> DecoderSpec:
    """Under GLM-4V's tower, which has biases and does not say so."""
    return with_attention(glm4(config), qkv_bias=True)


def _rules(spec: DecoderSpec, norms: dict[str, str] | None = None) -> tuple[Rule, ...]:
    return (*llama_rules(spec.head.tied, norms), split("layers.{i}.ff.gate_up", "layers.{i}.ff", ("gate", "up")))


GLM = Family("glm", ("GlmForCausalLM",), ("glm",), glm, _rules)
GLM4V = Family("glm4v", (), ("glm4v_text",), glm4v, lambda spec: _rules(spec, SANDWICH))
GLM4 = Family("glm4", ("Glm4ForCausalLM",), ("glm4", "glm_ocr_text"), glm4, lambda spec: _rules(spec, SANDWICH))
