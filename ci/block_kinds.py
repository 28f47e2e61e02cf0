"""Every kind of block that the zoo runs natively, with a parity checkpoint that has it: what `ci/block_table.py` compares."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from pagoda.models.distance import Distances
from pagoda.models.positions import Learned, Sinusoids
from pagoda.models.recurrent import ChannelMix, GatedDelta, KimiDelta, Lightning, Selective, ShortConv, Ssd, TimeMix
from pagoda.models.rope import Rope
from pagoda.models.sound import Sound
from pagoda.models.spec import MLA, Alibi, Attention, Bidirectional, Both, Cross, DecoderSpec, Mlp, Moe, Normed, Residual, Shared, Xielu

Test = Callable[[DecoderSpec], bool]


class Kind(NamedTuple):
    """`checkpoint`: as `python -m parity.make` names its folder, below that of its task; `there`: whether a spec has the block."""

    name: str
    checkpoint: str
    there: Test


def _layers(spec: DecoderSpec) -> Iterator[Any]:
    yield from (*spec.layers, *(spec.encoder.layers if spec.encoder is not None else ()))


def _records(spec: DecoderSpec) -> Iterator[Any]:
    """Mixers and feed-forwards, and those within them."""
    for layer in _layers(spec):
        for part in (layer.mixer, layer.feed_forward):
            yield part
            yield from (getattr(part, name, None) for name in ("attention", "recurrent", "shared", "feed_forward"))


def _has(kind: type, test: Callable[[Any], bool] = lambda _: True) -> Test:
    return lambda spec: any(isinstance(record, kind) and test(record) for record in _records(spec))


def _each(test: Callable[[Any], bool]) -> Test:
    return lambda spec: any(test(layer) for layer in _layers(spec))


def _windowed(kind: str) -> Test:
    return _has(Attention, lambda a: a.window is not None and a.window.kind == kind)


def _normed(extent: str, after: bool = False) -> Test:
    return _has(Attention, lambda a: a.qk_norm is not None and a.qk_norm.extent == extent and a.qk_norm.after_rope == after)


def _pooled(kind: str, task: str) -> Test:
    return lambda spec: spec.pooler is not None and spec.pooler.kind == kind and spec.pooler.task == task


ATTENTION = (
    Kind("keys for every head", "causal/gpt2", _has(Attention, lambda a: a.heads == a.kv_heads)),
    Kind("grouped heads", "causal/llama", _has(Attention, lambda a: 1 < a.kv_heads < a.heads)),
    Kind("one KV head", "causal/gpt_bigcode", _has(Attention, lambda a: a.kv_heads == 1 < a.heads)),
    Kind("sliding windows", "causal/mistral", _windowed("sliding")),
    Kind("sliding and full layers", "causal/gemma3_text", lambda s: len({layer.mixer.window for layer in s.layers}) > 1),
    Kind("chunked windows", "causal/llama4_text", _windowed("chunked")),
    Kind("sinks", "causal/gpt_oss", _has(Attention, lambda a: a.sinks)),
    Kind("soft cap", "causal/gemma2", _has(Attention, lambda a: a.softcap is not None)),
    Kind("norms of q and k", "causal/qwen3", _normed("head")),
    Kind("norms after the rotation", "causal/hunyuan_v1_dense", _normed("head", True)),
    Kind("norms with each head's weights", "causal/stablelm@qk_layernorm", _normed("each")),
    Kind("norms over all heads", "causal/olmo2", _normed("full")),
    Kind("linear biases", "causal/bloom", _has(Attention, lambda a: isinstance(a.position, Alibi))),
    Kind("layers without positions", "causal/smollm3", _has(Attention, lambda a: a.position is None)),
    Kind("part of a head turns", "causal/phi", _has(Attention, lambda a: isinstance(a.position, Rope) and a.position.dims < a.head_dim)),
    Kind("pairs turn", "causal/glm", _has(Attention, lambda a: isinstance(a.position, Rope) and a.position.style == "interleaved")),
    Kind("clamped q, k, v", "causal/dbrx", _has(Attention, lambda a: a.clip is not None)),
    Kind("sharper with distance", "causal/ministral3", _has(Attention, lambda a: a.temper is not None)),
    Kind("gated output", "causal/afmoe", _has(Attention, lambda a: a.gated)),
    Kind("narrow values", "causal/mimo_v2_flash", _has(Attention, lambda a: a.value_dim < a.head_dim)),
    Kind("latents", "causal/deepseek_v3", _has(MLA, lambda m: m.index is None)),
    Kind("latents, chosen keys", "causal/deepseek_v32", _has(MLA, lambda m: m.index is not None and m.index.own)),
    Kind(
        "latents, keys that another layer chose", "causal/glm_moe_dsa@shared", _has(MLA, lambda m: m.index is not None and not m.index.own)
    ),
)

RECURRENT = (
    Kind("Mamba", "causal/mamba", _has(Selective, lambda m: m.inner_norm is None)),
    Kind("Mamba with norms inside", "causal/jamba", _has(Selective, lambda m: m.inner_norm is not None)),
    Kind("Mamba 2", "causal/mamba2", _has(Ssd)),
    Kind("gated delta rule", "causal/qwen3_next", _has(GatedDelta)),
    Kind("delta rule with a decay per channel", "causal/kimi_linear", _has(KimiDelta)),
    Kind("lightning attention", "causal/minimax", _has(Lightning)),
    Kind("short convolution", "causal/lfm2", _has(ShortConv)),
    Kind("RWKV's averages", "causal/rwkv", lambda s: _has(TimeMix)(s) and _has(ChannelMix)(s)),
    Kind("attention beside Mamba 2", "causal/falcon_h1", _has(Both)),
    Kind("attention that layers share, before Mamba 2", "causal/zamba2", _has(Shared)),
)

FEED_FORWARD = (
    Kind("gated", "causal/llama", _has(Mlp, lambda m: m.gated)),
    Kind("plain", "causal/gpt2", _has(Mlp, lambda m: not m.gated)),
    Kind("squared", "causal/nemotron", _has(Mlp, lambda m: m.activation == "relu2")),
    Kind("xIELU", "causal/apertus", _has(Mlp, lambda m: isinstance(m.activation, Xielu))),
    Kind("experts, softmax", "causal/mixtral", _has(Moe, lambda m: m.router.score == "softmax")),
    Kind("experts, softmax over the chosen", "causal/granitemoe", _has(Moe, lambda m: m.router.score == "softmax_after")),
    Kind("experts, sigmoids with a correction", "causal/minimax_m2", _has(Moe, lambda m: m.router.correction and m.router.groups == 1)),
    Kind("experts in groups, shared ones", "causal/deepseek_v3", _has(Moe, lambda m: m.router.groups > 1 and m.shared is not None)),
    Kind("experts, a gated shared one", "causal/qwen2_moe", _has(Moe, lambda m: m.shared_gate)),
    Kind("experts with biases", "causal/gpt_oss", _has(Moe, lambda m: m.bias)),
    Kind("experts, SparseMixer", "causal/phimoe", _has(Moe, lambda m: m.router.score == "sparsemixer")),
    Kind("experts, weights on the input", "causal/llama4_text", _has(Moe, lambda m: m.scale_input)),
    Kind("plain experts", "causal/nemotron_h", _has(Moe, lambda m: not m.gated)),
)

AROUND = (
    Kind("learned positions", "causal/gpt2", lambda s: isinstance(s.embed.positions, Learned)),
    Kind("sines for positions", "causal/xglm", lambda s: isinstance(s.embed.positions, Sinusoids)),
    Kind("norms before and after", "causal/gemma2", _each(lambda layer: layer.mixer_in is not None and layer.mixer_out is not None)),
    Kind("norms after", "causal/olmo2", _each(lambda layer: layer.mixer_in is None and layer.mixer_out is not None)),
    Kind("sublayers side by side", "causal/gpt_neox", _each(lambda layer: layer.residual is Residual.PARALLEL)),
    Kind("residual of normed streams", "causal/minimax", _each(lambda layer: isinstance(layer.residual, Normed))),
    Kind("scaled sublayers and logits", "causal/minicpm3", lambda s: s.layers[0].scale != 1.0 and s.head.scale != 1.0),
    Kind("capped logits", "causal/gemma2", lambda s: s.head.softcap is not None),
    Kind("tied head", "causal/gemma2", lambda s: s.head.tied),
    Kind("head with a bias", "causal/gptj", lambda s: s.head.bias),
)

ENCODERS = (
    Kind("BERT", "embed/bert", lambda s: _has(Bidirectional)(s) and s.embed.types > 0),
    Kind("RoBERTa, norms before", "embed/xlm-roberta-xl", lambda s: _has(Bidirectional)(s) and s.layers[0].residual is Residual.SEQUENTIAL),
    Kind("narrow embeddings", "embed/electra@narrow", lambda s: s.embed.width is not None),
    Kind("biases by distance", "embed/mpnet", _has(Attention, lambda a: isinstance(a.position, Distances))),
    Kind("rotary, windows to both sides", "embed/modernbert", lambda s: _has(Bidirectional)(s) and _windowed("sliding")(s)),
    Kind("rotary, gated", "embed/nomic_bert", lambda s: _has(Bidirectional)(s) and _has(Mlp, lambda m: m.gated)(s)),
    Kind("text encoder before a decoder", "seq2seq/bart", lambda s: s.encoder is not None and _has(Cross)(s)),
    Kind("the same with biases by distance", "seq2seq/t5", _has(Attention, lambda a: isinstance(a.position, Distances))),
    Kind("spectra before a decoder", "seq2seq/whisper", lambda s: s.encoder is not None and isinstance(s.encoder.entry, Sound)),
    Kind("samples before a decoder", "seq2seq/moonshine", lambda s: s.encoder is not None and not getattr(s.encoder.entry, "bins", 1)),
)

POOLED = (
    Kind("vectors of an encoder", "embed/bert", _pooled("cls", "embed")),
    Kind("vectors of a decoder", "embed/qwen3", _pooled("last", "embed")),
    Kind("vectors of each token, for late interaction", "embed/colbert", _pooled("all", "embed")),
    Kind("scores of an encoder", "classify/bert", _pooled("cls", "classify")),
    Kind("scores behind a norm", "classify/modernbert", lambda s: s.pooler is not None and len(s.pooler.steps) == 3),
    Kind("scores of a decoder", "classify/llama", _pooled("last", "classify")),
    Kind("scores of each token", "reward/bert", _pooled("all", "classify")),
)

SECTIONS = {
    "Attention": ATTENTION, "Recurrent mixers": RECURRENT, "Feed-forwards": FEED_FORWARD, "Around the layers": AROUND,
    "Encoders": ENCODERS, "Poolers": POOLED,
}  # fmt: skip
MIXERS = (*ATTENTION, *RECURRENT)
"""Kinds that keep something of a sequence, for which prompts in chunks, prefix hits and preemption are compared."""

MORE = ("embed/colbert", "embed/electra@narrow", "causal/glm_moe_dsa@shared")
"""Checkpoints that `ci/more_references.py` makes."""
