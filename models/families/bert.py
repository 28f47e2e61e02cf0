"""BERT and its line: RoBERTa, XLM-RoBERTa, CamemBERT, ELECTRA; vectors, sequence and token classification."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from pagoda.models.checkpoint import Also, Drop, Rename, Rule
from pagoda.models.config import Config
from pagoda.models.families.common import activation, plain_mlp, renamed
from pagoda.models.families.pooled import encoder, post_norm_layers, self_attention
from pagoda.models.family import Family
from pagoda.models.pooling import Dense, Pooler
from pagoda.models.spec import DecoderSpec, Embed, Layer, Learned, Norm

HEADS = {"bert": "tanh", "roberta": "tanh", "electra": "gelu"}
"""Activation of what stands before the scores of a whole text."""


def bert(config: Config, line: str = "bert", padded: bool = False, before: bool = False, embed_norm: bool = True) -> DecoderSpec:
    """`padded`: positions count from beyond the padding's id. `before`: norms come before sublayers, one more after the last layer; then
    the embeddings may lack one."""
    offset = config.integer("pad_token_id", default=1) + 1 if padded else 0
    width, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    config.require("position_embedding_type", "absolute", default="absolute")
    config.ignore("tie_word_embeddings", "pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers", "pooler_size_per_head")
    config.ignore("pooler_type", "directionality")
    norm = Norm("layer", config.number("layer_norm_eps", default=1e-12), bias=True)
    narrow = config.integer("embedding_size", default=width)
    rows = config.integer("max_position_embeddings")
    ff = plain_mlp(config.integer("intermediate_size"), activation(config, "hidden_act"))
    count, mixer = config.integer("num_hidden_layers"), self_attention(heads, width // heads)
    layers = (Layer(mixer, ff, norm, ff_in=norm),) * count if before else post_norm_layers(count, mixer, ff, norm, narrow == width)
    embed = Embed(
        positions=Learned(rows, offset),
        types=config.integer("type_vocab_size", default=2),
        norm=norm if (before and embed_norm) or narrow != width else None,
        width=None if narrow == width else narrow,
    )
    return encoder(config, width, layers, norm, embed, rows - offset, (Dense(width, HEADS[line]),))


roberta = partial(bert, line="roberta", padded=True)


def ernie(config: Config) -> DecoderSpec:
    """BERT; its third kind of embeddings, by task, is only read where it is used, which none of the published models does."""
    config.require("use_task_id", False, None)
    config.ignore("task_type_vocab_size")
    return bert(config)


def bert_rules(prefix: str, spec: DecoderSpec) -> tuple[Rule, ...]:
    """Names of BERT's line behind `prefix`, which bare models lack."""
    return (
        *(Also(f"{part}.{{x*}}", f"{prefix}.{part}.{{x*}}") for part in ("embeddings", "embeddings_project", "encoder", "pooler")),
        *head_rules(prefix, spec.pooler),
        *(Drop(f"{name}.{{x*}}") for name in ("cls", "lm_head", "generator_predictions", "generator_lm_head", "discriminator_predictions")),
        *embedding_names(prefix, "layers.0.mixer_in" if spec.embed.norm is None else "embed.norm"),
        Rename(f"{prefix}.embeddings_project.{{t}}", "embed.widen.{t}"),
        *layer_rules(f"{prefix}.encoder.layer", len(spec.layers)),
    )


def embedding_names(prefix: str, to: str = "layers.0.mixer_in", norms: tuple[str, ...] = ("embeddings.LayerNorm",)) -> tuple[Rule, ...]:
    """What stands before the layers; `to`: where the norm of the embeddings goes, by any of its names."""
    at = f"{prefix}.embeddings"
    return (
        *(Drop(f"{at}.{name}") for name in ("position_ids", "token_type_ids", "rotary_emb.{x*}")),
        Rename(f"{at}.word_embeddings.{{t}}", "embed.{t}"),
        Rename(f"{at}.position_embeddings.weight", "embed.positions"),
        Rename(f"{at}.token_type_embeddings.weight", "embed.types"),
        *(Rename(f"{prefix}.{theirs}.{{t}}", f"{to}.{{t}}") for theirs in norms),
    )


_LAYER = {
    "attention.self.query": "mixer.q", "attention.self.key": "mixer.k", "attention.self.value": "mixer.v",
    "attention.output.dense": "mixer.o", "attention.output.LayerNorm": "ff_in",
    "intermediate.dense": "ff.up", "output.dense": "ff.down",
}  # fmt: skip


def layer_rules(at: str, count: int, names: dict[str, str] | None = None, last: str = "output.LayerNorm") -> tuple[Rule, ...]:
    """Layers below `at`; the norm that ends a layer (`last`) is the one that begins the next."""
    return (
        *renamed(names or _LAYER, f"{at}.{{i}}"),
        *(Rename(f"{at}.{i}.{last}.{{t}}", f"layers.{i + 1}.mixer_in.{{t}}") for i in range(count - 1)),
        Rename(f"{at}.{count - 1}.{last}.{{t}}", "norm.{t}"),
    )


def before_rules(prefix: str, spec: DecoderSpec, names: dict[str, str], last: str) -> tuple[Rule, ...]:
    """Of models whose norms come before: `names` of the norms in a layer, and the one after the last layer."""
    at = f"{prefix}.encoder.layer"
    plain = {theirs: ours for theirs, ours in _LAYER.items() if "LayerNorm" not in theirs}
    layers = renamed(plain | names, f"{at}.{{i}}")
    parts = dict.fromkeys((last.partition(".")[0], "encoder"))
    bare = (Also(f"{part}.{{x*}}", f"{prefix}.{part}.{{x*}}") for part in parts)
    return (*bare, Rename(f"{prefix}.{last}.{{t}}", "norm.{t}"), *layers, *bert_rules(prefix, spec))


def head_rules(prefix: str, pooler: Pooler | None) -> tuple[Rule, ...]:
    """Where the scores' tensors are: BERT keeps the first projection with the model, others beside the last one."""
    assert pooler is not None
    if pooler.task == "embed":
        return (Drop(f"{prefix}.pooler.{{x*}}"),)
    if pooler.kind == "all":
        return (Drop(f"{prefix}.pooler.{{x*}}"), Rename("classifier.{t}", "pooler.0.{t}"))
    return (
        Rename("classifier.dense.{t}", "pooler.0.{t}"),
        Rename("classifier.out_proj.{t}", "pooler.1.{t}"),
        Rename(f"{prefix}.pooler.dense.{{t}}", "pooler.0.{t}"),
        Rename("classifier.{t}", "pooler.1.{t}"),
    )


def architectures(*stems: str) -> tuple[str, ...]:
    """The usual classes of a model: bare, with a head over the vocabulary (which is left out), and classifiers."""
    ends = ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification")
    return tuple(stem + end for stem in stems for end in ends)


def _family(name: str, stems: tuple[str, ...], model_types: tuple[str, ...], spec: Callable[[Config], DecoderSpec], prefix: str) -> Family:
    return Family(name, architectures(*stems), model_types, spec, partial(bert_rules, prefix), pools=True)


def _before(name: str, stem: str, spec: Callable[[Config], DecoderSpec], prefix: str, norms: dict[str, str], last: str) -> Family:
    rules = partial(before_rules, prefix, names=norms, last=last)
    return Family(name, architectures(stem), (name.replace("_", "-"),), spec, rules, pools=True)


ROBERTA_KIN = ("Roberta", "XLMRoberta", "Camembert")
BERTS = (
    _family("bert", ("Bert",), ("bert",), bert, "bert"),
    _family("roberta", ROBERTA_KIN, ("roberta", "xlm-roberta", "camembert"), roberta, "roberta"),
    _family("ernie", ("Ernie",), ("ernie",), ernie, "ernie"),
    _family("data2vec_text", ("Data2VecText",), ("data2vec-text",), roberta, "data2vec_text"),
    _family("electra", ("Electra",), ("electra",), partial(bert, line="electra"), "electra"),
    _before(
        "roberta_prelayernorm", "RobertaPreLayerNorm", partial(roberta, before=True), "roberta_prelayernorm",
        {"attention.LayerNorm": "mixer_in", "intermediate.LayerNorm": "ff_in"}, "LayerNorm",
    ),
    _before(
        "xlm_roberta_xl", "XLMRobertaXL", partial(roberta, before=True, embed_norm=False), "roberta",
        {"attention.self_attn_layer_norm": "mixer_in", "LayerNorm": "ff_in"}, "encoder.LayerNorm",
    ),
    _before(
        "megatron_bert", "MegatronBert", partial(bert, before=True, embed_norm=False), "bert",
        {"attention.ln": "mixer_in", "ln": "ff_in"}, "encoder.ln",
    ),
)  # fmt: skip
