"""A decoder as data: frozen records that a family makes of a checkpoint's configuration and `models.decoder` builds and runs.

A layer holds one mixer value and one feed-forward value, each its own record: a new architecture adds a record or a value, never a flag
that every other layer has to know. Records are equal when they mean the same, so that equal layers share kernels and cache groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal

from pagoda.models.distance import Distances
from pagoda.models.pooling import Pooler
from pagoda.models.positions import Learned, Sinusoids
from pagoda.models.recurrent import Recurrent
from pagoda.models.rope import Rope, RopeStyle
from pagoda.models.sound import Sound


@dataclass(frozen=True)
class Norm:
    """Normalise over the width it is used at. `offset` is added to the weight (1 for Gemma's 1 + w)."""

    kind: Literal["rms", "layer"]
    eps: float
    offset: float = 0.0
    weight: bool = True
    bias: bool = False


@dataclass(frozen=True)
class Window:
    """What a query sees: the last `size` tokens (sliding), or those of its own chunk of `size` (chunked)."""

    kind: Literal["sliding", "chunked"]
    size: int


@dataclass(frozen=True)
class Alibi:
    """Linear biases (arXiv:2108.12409): a slope per head instead of a position encoding. `max_bias` sets the steepest, `scale` all."""

    max_bias: float = 8.0
    scale: float = 1.0


@dataclass(frozen=True)
class QkNorm:
    """Norms of q and k, before or after the rotation: each head by itself with weights that all share ("head") or of its own ("each"),
    or over the width of all heads ("full")."""

    norm: Norm
    extent: Literal["head", "each", "full"] = "head"
    after_rope: bool = False


@dataclass(frozen=True)
class Temper:
    """q is multiplied by 1 + beta · ln(1 + ⌊(position + offset) / every⌋): the farther, the sharper (arXiv:2501.19399)."""

    beta: float
    every: float
    offset: int = 0


@dataclass(frozen=True)
class Attention:
    """Grouped-query attention.

    Attributes:
        heads, kv_heads, head_dim: geometry of the whole model, not of a rank.
        scale: multiplies q·k.
        position: None means that this layer knows no positions. `Distances`: learned biases of the logits (tensor `distances`).
        softcap: of the attention logits.
        sinks: a learned logit per head joins the softmax.
        qkv_bias, out_bias: projections have biases.
        clip: q, k and v are clamped to ± clip.
        temper: sharpens what far positions attend to.
        gated: the output is multiplied by a sigmoid of a projection as wide.
        v_dim: numbers of a head of v, where they are not `head_dim`; v_scale multiplies v.
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    position: Rope | Alibi | Distances | None = None
    window: Window | None = None
    qk_norm: QkNorm | None = None
    softcap: float | None = None
    sinks: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    clip: float | None = None
    temper: Temper | None = None
    gated: bool = False
    v_dim: int | None = None
    v_scale: float = 1.0

    @property
    def value_dim(self) -> int:
        return self.head_dim if self.v_dim is None else self.v_dim


@dataclass(frozen=True)
class Index:
    """A query of latent attention sees the `top_k` keys that small heads choose (arXiv:2512.02556).

    Attributes:
        heads, dim: of the small heads, which share one key a token; its first numbers turn as the layer's own, in `style`.
        own: the layer has such heads; otherwise it sees what the last layer that has them chose.
    """

    heads: int
    dim: int
    top_k: int
    style: RopeStyle
    own: bool = True


@dataclass(frozen=True)
class MLA:
    """Multi-head latent attention (arXiv:2405.04434): K and V come from a latent of `kv_rank` numbers and one rotated key for all heads.

    Attributes:
        heads: of the whole model.
        q_rank: width of the query's latent; None projects the query directly.
        nope_dim, rope_dim: numbers of a head of q and k that are not, and that are, rotated; v_dim: those of v.
        scale: multiplies q·k.
        position: turns the `rope_dim` numbers; None means that this layer knows no positions.
        norm: of the latents.
        down_bias, out_bias: the projections to the latents, and the last one, have biases.
        index: which keys a query sees; None: all.
    """

    heads: int
    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    scale: float
    position: Rope | None
    norm: Norm
    down_bias: bool = False
    out_bias: bool = False
    index: Index | None = None


@dataclass(frozen=True)
class Xielu:
    """A plain activation with numbers of its own in each layer (arXiv:2411.13010), `softplus` of which bend it:
    x > 0: αp · x² + β · x; else αn · (e^min(x, ε) − 1 − x) + β · x, with αn raised by β."""


@dataclass(frozen=True)
class Mlp:
    """A dense feed-forward: gated (`down(act(gate) · up)`) or plain (`down(act(up))`). `limit` clamps gate and up before use.

    `gate_scale` multiplies the gate before its activation, `scale` the output.
    """

    hidden: int
    activation: str | Xielu
    gated: bool = True
    up_bias: bool = False
    down_bias: bool = False
    limit: float | None = None
    gate_scale: float = 1.0
    scale: float = 1.0


@dataclass(frozen=True)
class Router:
    """How a token's experts are chosen and weighted; fields as in `ops.moe.RouteFacts`. `bias`: of the router's own projection."""

    score: Literal["softmax", "softmax_after", "sigmoid", "sparsemixer"] = "softmax"
    renormalize: bool = False
    groups: int = 1
    top_groups: int = 1
    group_score: Literal["max", "top2"] = "max"
    correction: bool = False
    bias: bool = False
    scale: float = 1.0
    jitter: float = 0.0


@dataclass(frozen=True)
class ClampedSwiglu:
    """`gate · σ(alpha · gate) · (up + 1)` with the gate clamped from above and up on both sides."""

    alpha: float
    limit: float


@dataclass(frozen=True)
class Moe:
    """Routed experts, `top_k` of `experts` per token; `shared` runs for every token, its output gated by a sigmoid where `shared_gate`.

    `bias`: experts have biases. `gated`: they are gated, or plain. `scale_input`: weights multiply the input instead of the output.
    """

    experts: int
    top_k: int
    hidden: int
    router: Router
    activation: str | ClampedSwiglu = "silu"
    shared: Mlp | None = None
    shared_gate: bool = False
    bias: bool = False
    scale_input: bool = False
    gated: bool = True


class Residual(Enum):
    """How the sublayers join the residual stream.

    SEQUENTIAL: each adds its output before the next begins. PARALLEL: both read the stream as it came in and add together; a layer
    without `ff_in` shares the mixer's norm.
    """

    SEQUENTIAL = "sequential"
    PARALLEL = "parallel"


@dataclass(frozen=True)
class Normed:
    """Each sublayer adds its output to what it read, normed, and not to the stream as it was: `keep` · normed + `add` · output."""

    mixer: tuple[float, float]
    feed_forward: tuple[float, float]


@dataclass(frozen=True)
class Both:
    """Attention and a recurrent mixer side by side over the same input, their outputs multiplied by `scales` and added (Falcon-H1)."""

    attention: Attention
    recurrent: Recurrent
    scales: tuple[float, float] = (1.0, 1.0)


@dataclass(frozen=True)
class Shared:
    """x + into(block([x, e])), normed, into a recurrent mixer, where e is what the layers began with (Zamba 2, arXiv:2411.15242).

    Attributes:
        block: attention and feed-forward number so many, whose tensors lie below `shared`; other layers may run the same.
        norm: of what attention, feed-forward and mixer read.
        rank: of what this layer alone adds to the first product of the feed-forward, and to q, k and v where `adapted`.
    """

    attention: Attention
    recurrent: Recurrent
    block: int
    feed_forward: Mlp
    norm: Norm
    rank: int
    adapted: bool


@dataclass(frozen=True)
class Bidirectional:
    """Attention of a prompt over all of itself, in both directions; nothing is cached. A window of `size` reaches so far to each side."""

    attention: Attention


@dataclass(frozen=True)
class Cross:
    """Attention of each token over all that the encoder gave for its request: at most `longest` tokens, `width` numbers each."""

    attention: Attention
    width: int
    longest: int


Mixer = Attention | Bidirectional | Cross | MLA | Recurrent | Both | Shared


@dataclass(frozen=True)
class Layer:
    """Two sublayers with a norm before (`_in`) and after (`_out`) each, where not None; outputs are multiplied by `scale`."""

    mixer: Mixer | None
    feed_forward: Mlp | Moe | None
    mixer_in: Norm | None = None
    mixer_out: Norm | None = None
    ff_in: Norm | None = None
    ff_out: Norm | None = None
    residual: Residual | Normed = Residual.SEQUENTIAL
    scale: float = 1.0


@dataclass(frozen=True)
class Embed:
    """The way in: looked-up rows · scale, plus positions, then a norm.

    `round_scale`: the scale is rounded to the computing dtype and the table's own: embeddings of media stay as they are.

    `types`: rows of a table of token types (the second text of a pair is of type 1); `width`: of the table, where a projection widens it.
    `joins`: norm of the rows, and of a state that comes with each token (`ModelInputs.states`); a product makes one of both.
    """

    scale: float = 1.0
    round_scale: bool = False
    positions: Learned | Sinusoids | None = None
    norm: Norm | None = None
    types: int = 0
    width: int | None = None
    joins: Norm | None = None


@dataclass(frozen=True)
class Head:
    """The way out: logits · scale, then capped. `tied`: the embedding's own table."""

    tied: bool
    scale: float = 1.0
    softcap: float | None = None
    bias: bool = False


@dataclass(frozen=True)
class Encoder:
    """What reads a request's input, in both directions, before its first token; its tensors lie below `encoder`.

    `entry`: the way in. `vocab`: rows of its table, which is the decoder's where `shared`. `longest`: most tokens that it gives.
    """

    width: int
    layers: tuple[Layer, ...]
    norm: Norm | None
    entry: Embed | Sound
    longest: int
    vocab: int = 0
    shared: bool = False


@dataclass(frozen=True)
class DecoderSpec:
    """A whole text model. `norm`: after the last layer. `max_positions`: longest sequence that its positions allow.

    `pooler`: it answers with vectors or scores, and has no `head`. `encoder`: what its `Cross` layers attend to.
    """

    vocab: int
    width: int
    layers: tuple[Layer, ...]
    norm: Norm | None
    embed: Embed
    head: Head
    max_positions: int
    pooler: Pooler | None = None
    encoder: Encoder | None = None
