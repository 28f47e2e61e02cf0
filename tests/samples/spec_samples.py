"""Random legal specs, random weights for them, and models built from both."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import strategies as st
from pagoda.hal.comm import Communicator
from pagoda.hal.device import Device
from pagoda.hal.discovery import find
from pagoda.hal.kernel import Kernel
from pagoda.hal.table import KernelTable
from pagoda.models.builder import Builder, Numerics
from pagoda.models.decoder import Decoder
from pagoda.models.fusion import RULES, Rule
from pagoda.models.loading.memory_source import MemorySource
from pagoda.models.model import ModelFacts
from pagoda.models.parallel.shard import Shard
from pagoda.models.rope import DynamicScaling, LinearScaling, Llama3Scaling, LongRopeScaling, Rope, YarnScaling
from pagoda.models.spec import (
    MLA,
    Alibi,
    Attention,
    ClampedSwiglu,
    DecoderSpec,
    Embed,
    Head,
    Layer,
    Learned,
    Mlp,
    Moe,
    Norm,
    QkNorm,
    Residual,
    Router,
    Temper,
    Window,
    Xielu,
)
from pagoda.ops.table import kernel_table
from pagoda.quant.registry import format_for

WIDTH, VOCAB, POSITIONS = 16, 41, 64
PLAIN = format_for({}, {}, "none")

JOINED_KERNELS = (
    Kernel("rope_write", "joined", "pagoda.ops.rope_write:RopeWriteReference", rank=1.0),
    Kernel("norm_gemm", "joined", "pagoda.ops.norm_gemm:NormGemmReference", rank=1.0),
    Kernel("add_rms_norm", "joined", "pagoda.ops.norm:AddRmsNormReference", rank=1.0),
)
"""A kernel for every primitive of fusion."""


def opened() -> tuple[Device, KernelTable]:
    backend = find("reference")
    device = backend.open()
    return device, kernel_table(backend, device.info)


def parameters(spec: DecoderSpec) -> dict[str, tuple[int, ...]]:
    build = Builder(Numerics("float32", "float32"), Shard(), PLAIN)
    Decoder(spec, build)
    return {path: parameter.shape for path, parameter in build.parameters.items()}


def draw_weights(spec: DecoderSpec, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weights = {path: torch.randn(shape, generator=generator) for path, shape in parameters(spec).items()}
    return {path: tensor / (tensor.shape[-1] ** 0.5 if tensor.dim() > 1 else 2.0) for path, tensor in weights.items()}


def build_model(
    spec: DecoderSpec,
    weights: dict[str, torch.Tensor],
    device: Device,
    table: KernelTable,
    shard: Shard | None = None,
    communicator: Communicator | None = None,
    rules: Sequence[Rule] = RULES,
) -> Decoder:
    stored = MemorySource(weights, "pagoda").tensors
    build = Builder(Numerics("float32", "float32"), shard or Shard(), PLAIN, stored, table, device, communicator, rules=rules)
    decoder = Decoder(spec, build)
    decoder.facts = ModelFacts("Random", spec.vocab, spec.width, spec.max_positions, decoder.caches, build.nbytes, 0)
    return decoder


norms = st.builds(
    Norm,
    st.sampled_from(("rms", "layer")),
    st.sampled_from((1e-6, 1e-3)),
    st.sampled_from((0.0, 1.0)),
    bias=st.just(False),
) | st.just(Norm("layer", 1e-5, bias=True)) | st.just(Norm("layer", 1e-5, weight=False))  # fmt: skip
rms_norms = st.builds(Norm, st.just("rms"), st.sampled_from((1e-6, 1e-3)), st.sampled_from((0.0, 1.0)))


@st.composite
def ropes(draw: st.DrawFn, head_dim: int) -> Rope:
    dims = draw(st.sampled_from((head_dim, head_dim // 2)))
    factors = st.tuples(*(st.floats(1, 4) for _ in range(dims // 2)))
    scaling = draw(
        st.none()
        | st.just(LinearScaling(4.0))
        | st.just(YarnScaling(4.0, 16, 1.1))
        | st.just(YarnScaling(2.0, 32, 1.0, truncate=False))
        | st.just(Llama3Scaling(8.0, 1.0, 4.0, 32))
        | st.just(DynamicScaling(2.0, 8))
        | st.builds(LongRopeScaling, factors, factors, st.sampled_from((8, 32)), st.just(1.2))
    )
    return Rope(draw(st.sampled_from((100.0, 10000.0))), dims, draw(st.sampled_from(("neox", "interleaved"))), scaling)


@st.composite
def attentions(draw: st.DrawFn) -> Attention:
    kv, group, dim = draw(st.sampled_from((1, 2, 3))), draw(st.sampled_from((1, 2))), draw(st.sampled_from((8, 12)))
    position = draw(st.none() | ropes(dim) | st.builds(Alibi, st.sampled_from((8.0, 4.0)), st.sampled_from((1.0, 0.3))))
    qk_norm = draw(st.none() | st.builds(QkNorm, rms_norms, st.sampled_from(("head", "each", "full")), st.booleans()))
    return Attention(
        kv * group,
        kv,
        dim,
        draw(st.sampled_from((dim**-0.5, 0.2))),
        position,
        draw(st.none() | st.builds(Window, st.sampled_from(("sliding", "chunked")), st.sampled_from((3, 8)))),
        qk_norm,
        draw(st.none() | st.just(20.0)),
        sinks=draw(st.booleans()),
        qkv_bias=draw(st.booleans()),
        out_bias=draw(st.booleans()),
        clip=draw(st.none() | st.just(1.5)),
        temper=draw(st.none() | st.builds(Temper, st.sampled_from((0.1, 0.5)), st.sampled_from((3.0, 8.0)), st.sampled_from((0, 1)))),
        v_dim=draw(st.none() | st.sampled_from((4, 8))),
        v_scale=draw(st.sampled_from((1.0, 0.7))),
    )


@st.composite
def latents(draw: st.DrawFn) -> MLA:
    turned = draw(st.sampled_from((8, 12)))
    return MLA(
        draw(st.sampled_from((2, 4))),
        draw(st.none() | st.just(6)),
        draw(st.sampled_from((5, 8))),
        draw(st.sampled_from((6, 8))),
        turned,
        draw(st.sampled_from((6, 16))),
        draw(st.sampled_from((0.3, 0.2))),
        draw(st.none() | ropes(turned)),
        draw(rms_norms),
        down_bias=draw(st.booleans()),
        out_bias=draw(st.booleans()),
    )


mixers = attentions() | attentions() | latents()
activations = st.sampled_from(("silu", "gelu", "gelu_tanh", "relu2"))
gated_or_plain = st.builds(Mlp, st.sampled_from((8, 24)), activations, st.booleans(), st.booleans(), st.booleans())
mlps = gated_or_plain | gated_or_plain | st.builds(Mlp, st.just(24), st.just(Xielu()), st.just(False), st.booleans(), st.booleans())
routers = st.builds(
    Router, st.sampled_from(("softmax", "sigmoid")), st.booleans(), correction=st.booleans(), bias=st.booleans(),
    scale=st.sampled_from((1.0, 2.5)),
) | st.just(Router("softmax_after")) | st.just(Router("sparsemixer", bias=True, jitter=0.3))  # fmt: skip


@st.composite
def moes(draw: st.DrawFn) -> Moe:
    shared = draw(st.none() | mlps)
    experts = draw(st.sampled_from((4, 6)))
    return Moe(
        experts,
        draw(st.sampled_from((1, 2, 4))),
        8,
        draw(routers),
        draw(activations | st.just(ClampedSwiglu(1.7, 1.0))),
        shared,
        shared is not None and draw(st.booleans()),
        bias=draw(st.booleans()),
    )


@st.composite
def layers(draw: st.DrawFn) -> Layer:
    places = [draw(st.none() | norms) for _ in range(4)]
    residual = draw(st.sampled_from(Residual))
    if residual is Residual.PARALLEL:
        return Layer(draw(mixers), draw(mlps | moes()), places[0], places[1], places[2], None, residual, draw(st.sampled_from((1.0, 0.5))))
    kept = draw(st.sampled_from(("both", "both", "both", "mixer", "feed_forward")))
    mixer = None if kept == "feed_forward" else draw(mixers)
    ff = None if kept == "mixer" else draw(mlps | moes())
    slots = [place if present else None for place, present in zip(places, (mixer, mixer, ff, ff), strict=True)]
    return Layer(mixer, ff, *slots, residual, draw(st.sampled_from((1.0, 0.5))))


@st.composite
def specs(draw: st.DrawFn) -> DecoderSpec:
    positions = draw(st.none() | st.builds(Learned, st.just(POSITIONS + 2), st.sampled_from((0, 2))))
    tied = draw(st.booleans())
    return DecoderSpec(
        VOCAB,
        WIDTH,
        tuple(draw(st.lists(layers(), min_size=1, max_size=3))),
        draw(st.none() | norms),
        Embed(draw(st.sampled_from((1.0, 4.0))), False, positions, draw(st.none() | norms)),
        Head(tied, draw(st.sampled_from((1.0, 0.25))), draw(st.none() | st.just(10.0)), bias=not tied and draw(st.booleans())),
        POSITIONS,
    )
