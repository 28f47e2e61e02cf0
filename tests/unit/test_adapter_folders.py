"""PEFT folders: what fits is mapped through the checkpoint's rules, what does not is refused by name before any weight loads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from lora_folders import make_adapter, merged, modules_of
from pagoda.hal.errors import CheckpointError, ConfigError
from pagoda.models.adapters.peft import Adapter, read_adapter
from pagoda.models.adapters.slots import LoraLimits
from pagoda.models.load import Description, describe, open_checkpoint
from pagoda.serving.engine.adapters import AdapterModule
from pagoda.serving.engine.adapters import modules_of as parsed
from tiny_checkpoints import make

TARGETS = {
    "Llama": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    "Phi3": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
    "GPT2LMHeadModel": ("c_attn", "c_proj", "c_fc"),
    "GPTNeoX": ("query_key_value", "dense", "dense_h_to_4h"),
}
SETTINGS = {"GPT2LMHeadModel": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}}


def described(folder: Path) -> Description:
    return describe(open_checkpoint(folder), dtype="float32", lora=LoraLimits(1, 8))


@pytest.mark.parametrize("family", TARGETS)
def test_what_the_factors_add_is_what_merging_adds(tmp_path: Path, family: str) -> None:
    make(tmp_path / "base", family, **SETTINGS.get(family, {}))
    turned = family == "GPT2LMHeadModel"
    folder = make_adapter(tmp_path / "a", modules_of(tmp_path / "base", TARGETS[family]), 5, transposed=turned)
    whole = merged(tmp_path / "base", folder, tmp_path / "merged", transposed=turned)
    base, changed = described(tmp_path / "base"), described(whole).stored
    factors = read_adapter(folder, base).factors
    assert {
        path for path in base.adaptable if not torch.equal(base.stored[f"{path}.weight"].read(), changed[f"{path}.weight"].read())
    } == set(factors)
    for path, pair in factors.items():
        wanted = changed[f"{path}.weight"].read() - base.stored[f"{path}.weight"].read()
        assert torch.allclose(pair.up.T @ pair.down, wanted, atol=1e-5)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("refused") / "base"
    make(folder, "Llama")
    return folder


Q = "model.layers.0.self_attn.q_proj"
REFUSED = {
    "use_dora": ({Q: (32, 32)}, {"use_dora": True}, "DoRA"),
    "bias": ({Q: (32, 32)}, {"bias": "all"}, "bias='all'"),
    "saved modules": ({Q: (32, 32)}, {"modules_to_save": ["lm_head"]}, "modules_to_save"),
    "kind": ({Q: (32, 32)}, {"peft_type": "IA3"}, "IA3"),
    "rank": ({Q: (32, 32)}, {"rank": 9}, "--max-lora-rank 9"),
    "shape": ({Q: (48, 32)}, {}, r"shape \[48, 32\].*has \[32, 32\]"),
    "head": ({"lm_head": (131, 32)}, {}, "embedding and of the head"),
    "experts": ({"model.layers.0.mlp.experts.0.up_proj": (48, 32)}, {}, "routed experts"),
    "unknown": ({"model.layers.0.self_attn.w_proj": (32, 32)}, {}, "w_proj: the model has no such linear layer; there are down, gate, k"),
    "layer": ({"model.layers.7.self_attn.q_proj": (32, 32)}, {}, "layers.7"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_by_name(tmp_path: Path, base: Path, case: str) -> None:
    modules, config, message = REFUSED[case]
    with pytest.raises(CheckpointError, match=message):
        read_adapter(make_adapter(tmp_path, modules, 1, **config), described(base))


def damaged(change: Callable[[Path], object], folder: Path, base: Path) -> Adapter:
    make_adapter(folder, {Q: (32, 32)}, 1)
    change(folder)
    return read_adapter(folder, described(base))


def test_damaged_folders_are_refused(tmp_path: Path, base: Path) -> None:
    for change, message in (
        (lambda folder: (folder / "adapter_config.json").unlink(), "no adapter_config.json"),
        (lambda folder: (folder / "adapter_config.json").write_text("{"), "not JSON"),
        (lambda folder: (folder / "adapter_model.safetensors").unlink(), "no adapter_model.safetensors"),
        (lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"1234"), "truncated"),
    ):
        with pytest.raises(CheckpointError, match=message):
            damaged(change, tmp_path, base)


def test_module_flags() -> None:
    given = parsed(["a=/x", '{"name": "b", "path": "/y", "base_model_name": "m"}'])
    assert given == (AdapterModule("a", "/x"), AdapterModule("b", "/y", "m"))
    for wrong in (["a"], ["=x"], ["{"], ['{"name": "a"}'], ["a=/x", "a=/y"]):
        with pytest.raises(ConfigError):
            parsed(wrong)
