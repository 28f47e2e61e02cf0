"""Checkpoint rules: what they lead to, lazily; that they lead back; what they say of tensors that do not fit."""

from __future__ import annotations

import pytest
import torch
from pagoda.hal.errors import CheckpointError
from pagoda.models.checkpoint import Add, Also, Drop, Join, Rename, Reorder, Rule, Split, Stack, Transpose, Unstack, apply, inverse
from pagoda.models.loading.memory_source import MemorySource
from pagoda.models.registry import BUILT_IN
from pagoda.quant.format import StoredTensor


def tensors(**shapes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def stored(values: dict[str, torch.Tensor]) -> dict[str, StoredTensor]:
    return dict(MemorySource(values).tensors)


def read(found: dict[str, StoredTensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.read() for name, tensor in found.items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[name].shape == b[name].shape and torch.allclose(a[name], b[name]) for name in a)


RULES: dict[str, tuple[Rule, ...]] = {
    "rename": (Rename("layers.{i}.x.{t}", "l.{i}.y.{t}"),),
    "rename the rest": (Rename("layers.{r*}", "model.layers.{r*}"),),
    "split": (Split("layers.{i}.x.weight", ("q.{i}", "k.{i}", "v.{i}"), (4, 6, 2)),),
    "split columns": (Split("layers.{i}.x.weight", ("q.{i}", "k.{i}"), dim=1),),
    "split equally": (Split("layers.{i}.x.weight", ("q.{i}", "k.{i}", "v.{i}")),),
    "join": (Join(("layers.{i}.x.weight", "layers.{i}.z.weight"), "layers.{i}.xz.weight", (12, 4)),),
    "stack": (Stack("layers.{i}.x.weight", "all.x", "i", 3),),
    "unstack": (Unstack("experts.{t}", "experts.{e}.{t}", "e", 3),),
    "transpose": (Transpose("layers.{i}.x.weight"),),
    "interleaved": (Reorder("layers.{i}.x.weight", (2, 3, 2), (1, 0, 2)),),
    "add": (Add("norm.weight", 1.0),),
    "all": (
        Reorder("layers.{i}.x.weight", (3, 2, 2), (0, 2, 1)),
        Split("layers.{i}.x.weight", ("layers.{i}.q.weight", "layers.{i}.kv.weight"), (4, 8)),
        Transpose("layers.{i}.q.weight"),
        Stack("layers.{i}.kv.weight", "kv", "i", 3),
        Add("norm.weight", -1.0),
        Rename("experts.{t}", "moe.{t}"),
    ),
}


def sample() -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    layers = {f"layers.{i}.x.weight": torch.randn(12, 8) for i in range(3)} | {f"layers.{i}.z.weight": torch.randn(4, 8) for i in range(3)}
    return {**layers, "experts.up": torch.randn(3, 5, 8), "norm.weight": torch.randn(8)}


@pytest.mark.parametrize("case", RULES)
def test_the_inverse_leads_back(case: str) -> None:
    values, rules = sample(), RULES[case]
    there = apply(rules, stored(values))
    assert there.keys() != values.keys() or not same(read(there), values), "the rule must do something"
    assert same(read(apply(inverse(rules), there)), values)


@pytest.mark.parametrize("case", RULES)
def test_reading_a_part_equals_a_part_of_what_is_read(case: str) -> None:
    for tensor in apply(RULES[case], stored(sample())).values():
        whole = tensor.read()
        assert tuple(whole.shape) == tensor.shape
        for index in ((slice(1, 3),), (slice(0, 2), slice(1, 2))[: whole.dim()], (slice(None), slice(2, 5))[: whole.dim()], (slice(2, 2),)):
            assert torch.equal(tensor.read(index), whole[index])


def test_what_each_rule_means() -> None:
    values = sample()
    x = values["layers.1.x.weight"]
    assert torch.equal(apply(RULES["split"], stored(values))["k.1"].read(), x[4:10])
    assert torch.equal(apply(RULES["stack"], stored(values))["all.x"].read()[1], x)
    assert torch.equal(apply(RULES["transpose"], stored(values))["layers.1.x.weight"].read(), x.T)
    assert torch.equal(apply(RULES["unstack"], stored(values))["experts.2.up"].read(), values["experts.up"][2])
    assert torch.equal(apply(RULES["add"], stored(values))["norm.weight"].read(), values["norm.weight"] + 1)
    turned = apply(RULES["interleaved"], stored(values))["layers.1.x.weight"].read()
    assert torch.equal(turned, x.view(2, 3, 2, 8).transpose(0, 1).reshape(12, 8))
    assert "norm.weight" not in apply((Drop("norm.{t}"),), stored(values))


def test_a_placeholder_is_one_word() -> None:
    found = apply((Rename("a.{x}.w", "b.{x}"),), stored(tensors(**{"a.1.w": (2,), "a.1.2.w": (2,), "a.w": (2,)})))
    assert set(found) == {"b.1", "a.1.2.w", "a.w"}


def test_another_spelling_leads_the_same_way_and_back_to_the_usual_one() -> None:
    rules = (Also("h.{x*}", "model.h.{x*}"), Rename("model.h.{x*}", "layers.{x*}"))
    for name in ("h.0.w", "model.h.0.w"):
        there = apply(rules, stored(tensors(**{name: (2,)})))
        assert set(there) == {"layers.0.w"}
        assert set(apply(inverse(rules), there)) == {"model.h.0.w"}


def test_incomplete_stacks_stay_as_they_are() -> None:
    found = apply((Stack("e.{e}.w", "all", "e", 3),), stored(tensors(**{"e.0.w": (2,), "e.2.w": (2,)})))
    assert set(found) == {"e.0.w", "e.2.w"}


def test_two_tensors_must_not_lead_to_one_name() -> None:
    with pytest.raises(CheckpointError, match=r"two tensors .* lead to c: a and c"):
        apply((Rename("a", "c"),), stored(tensors(a=(2,), c=(2,))))


def test_a_fused_tensor_of_other_size_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"qkv has 10 rows, the configuration expects 12 = 4 \+ 4 \+ 4"):
        apply((Split("qkv", ("q", "k", "v"), (4, 4, 4)),), stored(tensors(qkv=(10, 3))))


def test_every_family_names_its_architectures_once() -> None:
    names = [name for family in BUILT_IN for name in family.architectures]
    assert len(names) == len(set(names))
