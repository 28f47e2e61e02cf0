"""Fusion: a pass over the spec tree that finds named sequences of primitives, and puts one primitive there or says why not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from pagoda.hal.kernel import Facts, Reason
from pagoda.hal.table import KernelTable
from pagoda.models.parallel.shard import Shard
from pagoda.models.rope import Rope
from pagoda.models.spec import Attention, Both, DecoderSpec, Layer, Mixer, Mlp, Moe, Norm, QkNorm, Residual, Xielu
from pagoda.ops.act_gemm import ActGemmFacts
from pagoda.ops.activation import ActivationFacts
from pagoda.ops.attention import AttentionFacts
from pagoda.ops.norm import NormFacts
from pagoda.ops.norm_gemm import NormGemmFacts
from pagoda.ops.rope import RopeFacts
from pagoda.ops.rope_write import RopeWriteFacts
from pagoda.quant.format import Format
from pagoda.quant.none import PlainFormat

if TYPE_CHECKING:
    from pagoda.models.builder import Numerics


class Node(NamedTuple):
    """A primitive, or what else computes between two of them; `path`: of the block, or the norm, in the spec tree."""

    op: str
    path: str
    facts: Any = None


Chain = tuple[Node, ...]
"""Nodes of which each takes what the one before it gave."""

WORDS = {
    "lora_delta": "an adapter sits between",
    "tap": "a tap of hidden states sits between",
    "gate": "a gate lies beside q, k and v",
    "clamp": "a clamp sits between",
    "values": "values are of another width, or scaled",
    "temper": "a factor by position sits between",
    "both": "two parts read the norm",
    "full_norm": "the norm spans all heads",
    "each_norm": "each head's norm has weights of its own",
}


@dataclass(frozen=True)
class Rule:
    """One primitive for several.

    Attributes:
        op: the primitive that it puts there.
        sequences: of primitives that it replaces, any of them; all begin alike.
        facts: of the one primitive, from the nodes replaced; `page_size` is 0 where it has one.
        quiet: places where its sequence only begins are not spoken of.
    """

    op: str
    sequences: tuple[tuple[str, ...], ...]
    facts: Callable[[Chain], Facts]
    quiet: bool = False


@dataclass(frozen=True)
class Site:
    """A place where a rule's sequence begins. `path`: of its last primitive. `facts`: None where `reason` says why it steps back."""

    rule: Rule
    path: str
    facts: Facts | None
    reason: Reason | None = None

    def on(self, table: KernelTable | None, page_size: int | None = None) -> Site:
        """The same on a device: it steps back where only the reference knows the one primitive, or another was asked for by name."""
        if self.facts is None or table is None:
            return self
        facts = self.facts if page_size is None or not hasattr(self.facts, "page_size") else replace(self.facts, page_size=page_size)  # type: ignore[type-var]
        reason = _refusal(table, self.rule, facts)
        return replace(self, facts=None if reason else facts, reason=reason)


def _refusal(table: KernelTable, rule: Rule, facts: Facts) -> Reason | None:
    explicit = table.policy.explicit.keys()
    if rule.op in explicit:
        return None
    named = sorted(explicit & {op for sequence in rule.sequences for op in sequence})
    return f"{', '.join(named)} was asked for by name" if named else table.lacks(rule.op, facts)


def _add_rms_norm(nodes: Chain) -> Facts:
    facts: Facts = nodes[-1].facts
    return facts


def _rope_write(nodes: Chain) -> Facts:
    rope, pages = nodes[-2].facts, nodes[-1].facts
    norm = nodes[1].facts if nodes[1].op == "rms_norm" else None
    return RopeWriteFacts(
        rope.dtype, pages.kv_dtype, pages.num_heads, pages.num_kv_heads, pages.head_dim, rope.rotary_dim, 0, rope.style,
        norm is not None, norm.eps if norm else 0.0, norm.offset if norm else 0.0,
    )  # fmt: skip


def _norm_gemm(nodes: Chain) -> Facts:
    return NormGemmFacts(nodes[1].facts, nodes[2].facts, nodes[3].facts if len(nodes) > 3 else None)


def _act_gemm(nodes: Chain) -> Facts:
    return ActGemmFacts(nodes[0].facts, nodes[1].facts)


_PRODUCTS = (("gemm", "gated_activation"), ("gemm",), ("gemm_fp8",))

RULES = (
    Rule("add_rms_norm", (("add", "rms_norm"),), _add_rms_norm),
    Rule("norm_gemm", tuple(("add", "rms_norm", *rest) for rest in _PRODUCTS), _norm_gemm),
    Rule("act_gemm", (("gated_activation", "gemm_fp8"),), _act_gemm, quiet=True),
    Rule("rope_write", (("split", "rms_norm", "rms_norm", "rope", "write_kv"), ("split", "rope", "write_kv")), _rope_write),
)
"""Residual addition and norm; the same with the product that reads them and its activation; the way from a stacked product of q, k and
v to attention: norms of heads, rotation, cache write."""


def find(chains: Sequence[Chain], rules: Sequence[Rule] = RULES) -> tuple[Site, ...]:
    """Every place where a rule's sequence begins, in order; nothing is asked of a device yet (`Site.on`)."""
    found = (_look(rule, chain, at) for chain in chains for at in range(len(chain)) for rule in rules)
    return tuple(site for site in found if site is not None)


def _look(rule: Rule, chain: Chain, at: int) -> Site | None:
    if chain[at].op != rule.sequences[0][0]:
        return None
    ops = [node.op for node in chain[at:]]
    same = [_common(ops, sequence) for sequence in rule.sequences]
    for sequence, length in zip(rule.sequences, same, strict=True):
        if length == len(sequence):
            nodes = chain[at : at + length]
            return Site(rule, nodes[-1].path, rule.facts(nodes))
    end = at + max(same)
    if end == len(chain) or rule.quiet:
        return None
    return Site(rule, chain[end].path, None, WORDS.get(chain[end].op, f"{chain[end].op} follows {chain[end - 1].op}"))


def _common(ops: Sequence[str], sequence: Sequence[str]) -> int:
    """How many of the first ones are the same."""
    return next((i for i, (own, wanted) in enumerate(zip(ops, sequence)) if own != wanted), min(len(ops), len(sequence)))


class Fused(NamedTuple):
    """What a rule came to: `times` it was applied, and how often it stepped back for each reason."""

    op: str
    replaces: tuple[tuple[str, ...], ...]
    times: int
    apart: tuple[tuple[Reason, int], ...]


def summary(sites: Sequence[Site], rules: Sequence[Rule] = RULES) -> tuple[Fused, ...]:
    """One entry a rule that had places at all."""
    found = []
    for rule in rules:
        reasons = [site.reason for site in sites if site.rule is rule]
        if reasons:
            apart = Counter(reason for reason in reasons if reason is not None)
            found.append(Fused(rule.op, rule.sequences, reasons.count(None), tuple(apart.most_common())))
    return tuple(found)


def chains_of(
    spec: DecoderSpec, numerics: Numerics, shard: Shard, *, adapters: bool = False, taps: Sequence[int] = (), stored: Format | None = None
) -> tuple[Chain, ...]:
    """The primitives of a spec on one rank in the order in which they run, a chain for each sublayer and one for the last norm.

    Args:
        adapters: linear layers have room for adapters. taps: layers whose hidden states every step gives.
        stored: number format of the weights; None: plain numbers.
    """
    walk = _Walk(numerics, shard, adapters, spec.width, stored or PlainFormat())
    chains: list[Chain] = []
    before: Chain = ()
    for index, layer in enumerate(spec.layers):
        chains += walk.layer(f"layers.{index}", layer, before)
        before = (Node("add", ""), *((Node("tap", f"layers.{index}"),) if index in taps else ()))
    return (*chains, (*before, *walk.norm("norm", spec.norm)))


class _Walk:
    def __init__(self, numerics: Numerics, shard: Shard, adapters: bool, width: int, stored: Format) -> None:
        self._numerics, self._shard, self._adapters, self._width, self._stored = numerics, shard, adapters, width, stored

    def layer(self, path: str, layer: Layer, before: Chain) -> Iterator[Chain]:
        """A chain for each sublayer; `before`: what the stream comes through until the first reads it."""
        parallel = layer.residual is Residual.PARALLEL
        shared = () if layer.residual is Residual.SEQUENTIAL else (Node("both", path),)
        parts = (("mixer", layer.mixer, layer.mixer_in, layer.mixer_out), ("ff", layer.feed_forward, layer.ff_in, layer.ff_out))
        for name, part, norm_in, norm_out in parts:
            if part is None:
                continue
            body = self.body(f"{path}.{name}", part)
            yield (*before, *self.norm(f"{path}.{name}_in", norm_in), *shared, *body, *self.norm(f"{path}.{name}_out", norm_out))
            before = () if parallel else (Node("add", ""),)

    def norm(self, path: str, norm: Norm | None, width: int | None = None) -> Iterator[Node]:
        if norm is not None:
            facts = NormFacts(self._numerics.dtype, width or self._width, norm.eps, norm.offset, norm.weight, norm.bias)
            yield Node(f"{norm.kind}_norm", path, facts)

    def product(self, path: str, columns: int, inner: int, bias: bool) -> Iterator[Node]:
        op, facts = self._stored.product(self._numerics.dtype, columns, inner, bias)
        yield Node(op, path, facts)
        if self._adapters:
            yield Node("lora_delta", path)

    def attention(self, path: str, spec: Attention) -> Iterator[Node]:
        heads, kv = self._shard.split(spec.heads, "attention heads"), self._shard.kv_heads(spec.kv_heads)
        out = len(heads) * spec.value_dim
        columns = len(heads) * spec.head_dim + len(kv) * (spec.head_dim + spec.value_dim) + (out if spec.gated else 0)
        yield from self.product(path, columns, self._width, spec.qkv_bias)
        yield Node("split", path)
        if spec.gated:
            yield Node("gate", path)
        if spec.clip is not None:
            yield Node("clamp", path)
        if spec.value_dim != spec.head_dim or spec.v_scale != 1.0:
            yield Node("values", path)
        norms = list(self.head_norms(path, spec.qk_norm, spec.head_dim)) if spec.qk_norm else []
        after = spec.qk_norm is not None and spec.qk_norm.after_rope
        yield from () if after else norms
        if isinstance(spec.position, Rope):
            yield Node("rope", path, RopeFacts(self._numerics.dtype, spec.head_dim, spec.position.dims, spec.position.style))
        yield from norms if after else ()
        if spec.temper is not None:
            yield Node("temper", path)
        yield Node("write_kv", path, self.pages(spec))
        yield Node("paged_attention", path)
        yield from self.product(path, self._width, out, spec.out_bias)

    def head_norms(self, path: str, spec: QkNorm, head_dim: int) -> Iterator[Node]:
        plain = spec.extent == "head" and spec.norm.weight
        for name in ("q_norm", "k_norm"):
            own = self.norm(f"{path}.{name}", spec.norm, head_dim)
            yield from own if plain else (Node("full_norm" if spec.extent == "full" else "each_norm", path),)

    def pages(self, spec: Attention) -> AttentionFacts:
        heads, kv = self._shard.split(spec.heads, "attention heads"), self._shard.kv_heads(spec.kv_heads)
        dtype, kv_dtype, dim = self._numerics.dtype, self._numerics.kv_dtype, spec.head_dim
        return AttentionFacts(dtype, kv_dtype, len(heads), len(kv), dim, spec.value_dim, 0, spec.scale)

    def body(self, path: str, part: Mixer | Mlp | Moe) -> Iterator[Node]:
        """Of one sublayer; what others do than these is no sequence that a rule names."""
        match part:
            case Attention():
                yield from self.attention(path, part)
            case Both():
                yield Node("both", path)
                yield from self.attention(f"{path}.attention", part.attention)
            case Mlp():
                yield from self.feed_forward(path, part)
            case _:
                yield Node(type(part).__name__.lower(), path)

    def feed_forward(self, path: str, spec: Mlp) -> Iterator[Node]:
        hidden = len(self._shard.split(spec.hidden, "hidden numbers of the feed-forward"))
        yield from self.product(path, hidden * (2 if spec.gated else 1), self._width, spec.up_bias)
        if spec.gate_scale != 1.0:
            yield Node("scale", path)
        if not isinstance(spec.activation, Xielu):
            op = "gated_activation" if spec.gated else "activation"
            yield Node(op, path, ActivationFacts(self._numerics.dtype, spec.activation, spec.limit))
        yield from self.product(path, self._width, hidden, spec.down_bias)
