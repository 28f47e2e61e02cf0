"""Command R (Cohere 1, 2): both sublayers read one norm, angles in pairs, scaled logits; in 2 only sliding layers know positions."""

from __future__ import annotations

from dataclasses import replace

from pagoda.models.config import Config
from pagoda.models.families import llama
from pagoda.models.families.common import change_layers, llama_rules
from pagoda.models.family import Family
from pagoda.models.spec import Attention, DecoderSpec, Layer, Norm, QkNorm, Residual, Window


def cohere(config: Config) -> DecoderSpec:
    plain = _parallel(config, llama.spec(config, "interleaved"))
    if not config.flag("use_qk_norm", default=False):
        return plain
    norm = QkNorm(Norm("layer", config.number("layer_norm_eps", default=1e-5)), "each")
    return change_layers(plain, lambda _, layer, attention: replace(layer, mixer=replace(attention, qk_norm=norm)))


def cohere2(config: Config) -> DecoderSpec:
    period = config.integer("sliding_window_pattern", "_sliding_window_pattern", default=4)
    config.require("use_qk_norm", False, None)
    config.ignore("order_of_interleaved_layers", "rotary_pct", "layer_switch", "position_embedding_type", "use_embedding_sharing")
    config.ignore("use_gated_activation", "use_parallel_block", "use_parallel_embedding")
    plain = _parallel(config, llama.spec(config, "interleaved"))

    def change(i: int, layer: Layer, attention: Attention) -> Layer:
        window: Window | None = attention.window
        if not config.has("layer_types") and (i + 1) % period == 0:
            window = None
        return replace(layer, mixer=replace(attention, window=window, position=attention.position if window else None))

    return change_layers(plain, change)


def _parallel(config: Config, plain: DecoderSpec) -> DecoderSpec:
    norm = Norm("layer", config.number("layer_norm_eps", default=1e-5))
    head = replace(plain.head, tied=config.flag("tie_word_embeddings", default=True), scale=config.number("logit_scale", default=0.0625))
    parallel = change_layers(plain, lambda _, layer, a: Layer(a, layer.feed_forward, norm, residual=Residual.PARALLEL))
    return replace(parallel, norm=norm, head=head)


COHERE = Family("cohere", ("CohereForCausalLM",), ("cohere",), cohere, lambda spec: llama_rules(spec.head.tied))
COHERE2 = Family("cohere2", ("Cohere2ForCausalLM",), ("cohere2",), cohere2, lambda spec: llama_rules(spec.head.tied))
