"""SmolLM 3: Llama with layers that know no positions."""

from __future__ import annotations

from dataclasses import replace

from pagoda.models.config import Config
from pagoda.models.families import llama
from pagoda.models.families.common import llama_rules
from pagoda.models.families.qwen import qwen_windows
from pagoda.models.family import Family
from pagoda.models.spec import Attention, DecoderSpec, Head


def spec(config: Config) -> DecoderSpec:
    plain = llama.spec(config)
    layers = len(plain.layers)
    interval = config.integer("no_rope_layer_interval", default=4)
    rotated = config.list("no_rope_layers", kind=int, default=tuple(int((i + 1) % interval != 0) for i in range(layers)))
    attentions = [layer.mixer for layer in plain.layers if isinstance(layer.mixer, Attention)]
    changed = (
        replace(layer, mixer=replace(attention, window=window, position=attention.position if has_rope else None))
        for layer, attention, window, has_rope in zip(plain.layers, attentions, qwen_windows(config), rotated, strict=True)
    )
    return replace(plain, layers=tuple(changed), head=Head(tied=config.flag("tie_word_embeddings", default=True)))


SMOLLM3 = Family("smollm3", ("SmolLM3ForCausalLM",), ("smollm3",), spec, lambda spec: llama_rules(spec.head.tied))
