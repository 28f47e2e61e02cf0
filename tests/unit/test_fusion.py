"""The pass over the spec tree: what each rule finds, and why it steps back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from pagoda.hal.discovery import find as backend_named
from pagoda.hal.table import KernelPolicy, KernelTable
from pagoda.models.builder import Numerics
from pagoda.models.fusion import RULES, Rule, Site, chains_of, find, summary
from pagoda.models.parallel.shard import Shard
from pagoda.models.rope import Rope
from pagoda.models.spec import Attention, DecoderSpec, Embed, Head, Layer, Mlp, Norm, QkNorm, Residual, Temper
from pagoda.ops.act_gemm import ActGemmFacts
from pagoda.ops.activation import ActivationFacts
from pagoda.ops.linear import GemmFacts
from pagoda.ops.linear_fp8 import GemmFp8Facts
from pagoda.ops.norm import NormFacts
from pagoda.ops.norm_gemm import NormGemmFacts
from pagoda.ops.references import reference_kernels
from pagoda.ops.rope_write import RopeWriteFacts
from pagoda.quant.fp8 import Fp8Format
from pagoda.quant.gguf import GgufFormat
from spec_samples import JOINED_KERNELS, build_model, draw_weights, opened, specs

RMS = Norm("rms", 1e-5)
ATTENTION = Attention(4, 2, 16, 0.25, Rope(1e4, 16))
LAYER = Layer(ATTENTION, Mlp(24, "silu"), mixer_in=RMS, ff_in=RMS)
SPEC = DecoderSpec(41, 16, (LAYER, LAYER), RMS, Embed(), Head(True), 64)
FLOATS = Numerics("float32", "bfloat16")
INFO = backend_named("reference").open().info


def sites(spec: DecoderSpec, op: str, world: int = 1, rules: tuple[Rule, ...] = RULES, **walk: Any) -> dict[str, Site]:
    return {site.path: site for site in find(chains_of(spec, FLOATS, Shard(0, world), **walk), rules) if site.rule.op == op}


def with_layers(**changes: Any) -> DecoderSpec:
    return replace(SPEC, layers=(replace(LAYER, **changes),) * 2)


def with_attention(**changes: Any) -> DecoderSpec:
    return with_layers(mixer=replace(ATTENTION, **changes))


def reasons(spec: DecoderSpec, op: str, **walk: Any) -> list[str | None]:
    return [site.reason for site in sites(spec, op, **walk).values()]


def test_every_norm_after_an_addition_takes_it_along() -> None:
    found = sites(SPEC, "add_rms_norm")
    assert list(found) == ["layers.0.ff_in", "layers.1.mixer_in", "layers.1.ff_in", "norm"]
    assert {site.facts for site in found.values()} == {NormFacts("float32", 16, 1e-5)}


def test_the_way_to_attention_is_one_primitive_with_this_ranks_heads() -> None:
    assert [site.facts for site in sites(SPEC, "rope_write", 2).values()] == [RopeWriteFacts("float32", "bfloat16", 2, 1, 16, 16, 0)] * 2
    normed = sites(with_attention(qk_norm=QkNorm(Norm("rms", 1e-3, 1.0))), "rope_write")["layers.1.mixer"]
    assert normed.facts == RopeWriteFacts("float32", "bfloat16", 4, 2, 16, 16, 0, norm=True, eps=1e-3, offset=1.0)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"clip": 8.0}, "a clamp sits between"),
        ({"temper": Temper(0.1, 8.0)}, "a factor by position sits between"),
        ({"position": None}, "write_kv follows split"),
        ({"qk_norm": QkNorm(RMS, "full")}, "the norm spans all heads"),
        ({"qk_norm": QkNorm(RMS, "each")}, "each head's norm has weights of its own"),
        ({"qk_norm": QkNorm(Norm("layer", 1e-5))}, "layer_norm follows split"),
        ({"qk_norm": QkNorm(RMS, after_rope=True)}, "rms_norm follows rope"),
    ],
)
def test_what_stands_between_is_named(changes: dict[str, Any], reason: str) -> None:
    assert reasons(with_attention(**changes), "rope_write") == [reason] * 2


def test_a_tap_keeps_addition_and_norm_apart() -> None:
    found = sites(SPEC, "add_rms_norm", taps=(0, 1))
    assert [path for path, site in found.items() if site.reason is None] == ["layers.0.ff_in", "layers.1.ff_in"]
    assert {site.reason for site in found.values()} == {None, "a tap of hidden states sits between"}


def test_other_norms_and_other_residuals() -> None:
    layer_norms = replace(with_layers(ff_in=Norm("layer", 1e-5)), norm=None)
    assert reasons(layer_norms, "add_rms_norm") == ["layer_norm follows add", None, "layer_norm follows add"]
    side_by_side = with_layers(residual=Residual.PARALLEL)  # both read what the layer before gave; only the first finds it apart
    assert list(sites(side_by_side, "add_rms_norm")) == ["layers.1.mixer_in", "norm"]
    assert reasons(with_layers(mixer_in=None, mixer_out=RMS), "add_rms_norm") == [None, "gemm follows add", None, None]


def test_a_product_takes_addition_norm_and_activation_along() -> None:
    norm, act = NormFacts("float32", 16, 1e-5), ActivationFacts("float32", "silu")
    found = {path: site.facts for path, site in sites(SPEC, "norm_gemm").items() if site.facts is not None}
    qkv, up = NormGemmFacts(norm, GemmFacts("float32", 16, 128)), NormGemmFacts(norm, GemmFacts("float32", 16, 48), act)
    assert found == {"layers.0.ff": up, "layers.1.mixer": qkv, "layers.1.ff": up}
    assert set(reasons(SPEC, "norm_gemm", stored=GgufFormat())) == {"gemm_gguf follows rms_norm"}
    assert "two parts read the norm" in reasons(with_layers(residual=Residual.PARALLEL), "norm_gemm")


@pytest.mark.parametrize(("gated", "columns"), [(False, 4 * 16 + 2 * (16 + 4)), (True, 4 * 16 + 2 * (16 + 4) + 4 * 4)])
def test_values_narrower_than_keys_make_a_narrower_product(gated: bool, columns: int) -> None:
    found = sites(with_attention(v_dim=4, gated=gated), "norm_gemm")["layers.1.mixer"].facts
    assert isinstance(found, NormGemmFacts) and isinstance(found.gemm, GemmFacts) and found.gemm.out_features == columns


def test_products_with_float8_weights_take_norm_and_activation_along() -> None:
    form, norm, act = Fp8Format(), NormFacts("float32", 16, 1e-5), ActivationFacts("float32", "silu")
    products = {path: site.facts for path, site in sites(SPEC, "norm_gemm", stored=form).items() if site.facts is not None}
    assert products["layers.0.ff"] == NormGemmFacts(norm, GemmFp8Facts("float32", 16, 48))
    down = ActGemmFacts(act, GemmFp8Facts("float32", 24, 16))
    assert [site.facts for site in sites(SPEC, "act_gemm", stored=form).values()] == [down, down]
    assert not sites(SPEC, "act_gemm")


def test_an_adapter_between_keeps_a_product_apart_from_what_follows() -> None:
    rule = Rule("gemm_act", (("gemm", "gated_activation"),), lambda nodes: nodes[-1].facts)
    assert [site.path for site in sites(SPEC, "gemm_act", rules=(rule,)).values() if site.facts is not None] == [
        "layers.0.ff",
        "layers.1.ff",
    ]
    stepped = sites(SPEC, "gemm_act", rules=(rule,), adapters=True)["layers.0.ff"]
    assert (stepped.facts, stepped.reason) == (None, "an adapter sits between")
    assert reasons(SPEC, "add_rms_norm", adapters=True) == reasons(SPEC, "add_rms_norm")


def test_a_device_decides_by_its_kernels() -> None:
    joined = (*reference_kernels(), *JOINED_KERNELS)
    site = sites(SPEC, "rope_write")["layers.0.mixer"]
    fused = site.on(KernelTable(INFO, joined), 32)
    assert fused.facts == RopeWriteFacts("float32", "bfloat16", 4, 2, 16, 16, 32) and fused.reason is None
    assert site.on(KernelTable(INFO, reference_kernels()), 32).reason == "no kernel but the reference here"
    refusing = replace(JOINED_KERNELS[0], accepts=lambda facts: "pages are odd")
    assert site.on(KernelTable(INFO, (*reference_kernels(), refusing)), 32).reason == "joined: pages are odd"
    named = KernelTable(INFO, joined, KernelPolicy({"rope": "reference"}))
    assert site.on(named, 32).reason == "rope was asked for by name"
    asked = KernelTable(INFO, joined, KernelPolicy({"rope_write": "reference"}))
    assert site.on(asked, 32).facts is not None


def test_a_summary_counts() -> None:
    found = find(chains_of(with_attention(clip=1.0), FLOATS, Shard(), taps=(0,)))
    sums, products, writes = summary(found)
    assert (sums.op, sums.times, sums.apart) == ("add_rms_norm", 3, (("a tap of hidden states sits between", 1),))
    assert (products.op, products.times) == ("norm_gemm", 2)
    assert (writes.op, writes.times, writes.apart) == ("rope_write", 0, (("a clamp sits between", 2),))


@settings(max_examples=40, deadline=None)
@given(specs())
def test_the_builder_builds_what_the_pass_found(spec: DecoderSpec) -> None:
    device, _ = opened()
    ran: list[Any] = []

    def noted(choice: Any, run: Any) -> Any:
        ran.append((choice.op, choice.chosen.name))
        return run

    table = KernelTable(device.info, (*reference_kernels(), *JOINED_KERNELS), wrap=noted)
    model = build_model(spec, draw_weights(spec, 0), device, table)
    model.bind([None] * len(spec.layers), [0] * len(spec.layers), [16])
    found = find(chains_of(spec, Numerics("float32", "float32"), Shard()))
    for rule in RULES:
        wanted = any(site.facts is not None for site in found if site.rule is rule)
        assert ((rule.op, "joined") in ran) == wanted
