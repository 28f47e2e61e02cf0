"""What families of encoders share: reading of labels and heads, and the layers of BERT's line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

from pagoda.hal.errors import ModelError
from pagoda.models.config import Config
from pagoda.models.families.common import Heads
from pagoda.models.pooling import Dense, Pooler, PoolStep
from pagoda.models.rope import Rope
from pagoda.models.spec import Bidirectional, DecoderSpec, Embed, Head, Layer, Mlp, Norm, Normed

NO_HEAD = Head(tied=True)
"""Of models that answer with vectors or scores: the embedding's table stands for a head that is never made."""

POST_NORMS = Normed((1.0, 1.0), (1.0, 1.0))
"""Each sublayer reads the normed stream and adds to what it read, as BERT's norms after the sum have it."""


def architecture(config: Config) -> str:
    return str((config.values.get("architectures") or [""])[0])


def labels(config: Config) -> tuple[str, ...]:
    """Names of the scores, by number; transformers' two where the configuration says nothing."""
    named = config.values.get("id2label")
    if named:
        return tuple(str(name) for _, name in sorted((int(key), name) for key, name in named.items()))
    return tuple(f"LABEL_{i}" for i in range(config.integer("num_labels", default=2)))


def score_activation(config: Config, count: int) -> Literal["softmax", "sigmoid", "none"]:
    """What scores go through, as their problem wants it; cross-encoders of sentence-transformers may name it."""
    named = config.values.get("sentence_transformers") or {}
    given = str(named.get("activation_fn") or config.values.get("sbert_ce_default_activation_function") or "")
    config.ignore("sentence_transformers", "sbert_ce_default_activation_function")
    for word, kind in _ACTIVATIONS.items():
        if given.rpartition(".")[2] == word:
            return kind
    problem = config.values.get("problem_type")
    by_problem: Any = {"regression": "none", "multi_label_classification": "sigmoid", "single_label_classification": "softmax"}
    return by_problem.get(problem) or ("softmax" if count > 1 else "sigmoid")


_ACTIVATIONS: dict[str, Literal["softmax", "sigmoid", "none"]] = {"Identity": "none", "Sigmoid": "sigmoid", "Softmax": "softmax"}


def encoder_pooler(config: Config, head: Sequence[PoolStep], kind: Literal["cls", "mean"] = "cls", *, token_head: bool = False) -> Pooler:
    """By architecture: a label's scores of the whole text behind `head`, of each token (behind it too: `token_head`), or vectors."""
    name = architecture(config)
    if "Classification" not in name:
        return Pooler("embed", kind, normalize=True)
    if "ForSequence" not in name and "ForToken" not in name:
        raise ModelError(f"{name} answers neither for whole texts nor for tokens; only …ForSequenceClassification and …ForToken… do")
    named = labels(config)
    scores = Dense(len(named))
    activation = score_activation(config, len(named))
    if "ForToken" in name:
        return Pooler("classify", "all", (*(head if token_head else ()), scores), activation=activation, labels=named)
    return Pooler("classify", kind, (*head, scores), activation=activation, labels=named)


def encoder(
    config: Config, width: int, layers: Iterable[Layer], norm: Norm, embed: Embed, longest: int, pooler: Pooler | Sequence[PoolStep]
) -> DecoderSpec:
    """An encoder around its layers; `pooler`: or what stands before the scores of a whole text."""
    made = pooler if isinstance(pooler, Pooler) else encoder_pooler(config, pooler)
    return DecoderSpec(config.integer("vocab_size"), width, tuple(layers), norm, embed, NO_HEAD, longest, made)


def post_norm_layers(count: int, mixer: Bidirectional, ff: Mlp, norm: Norm, embed_norm: bool = True) -> tuple[Layer, ...]:
    """BERT's layers: the norm after a sum is the norm before the next sublayer, the first one that of the embeddings."""
    first = Layer(mixer, ff, norm if embed_norm else None, ff_in=norm, residual=POST_NORMS)
    return (first, *(Layer(mixer, ff, norm, ff_in=norm, residual=POST_NORMS),) * (count - 1))


def self_attention(heads: int, head_dim: int, position: Rope | None = None, bias: bool = True) -> Bidirectional:
    """As many heads for keys as for queries, the usual scale."""
    return Bidirectional(Heads(heads, heads, head_dim).attention(position, bias))
