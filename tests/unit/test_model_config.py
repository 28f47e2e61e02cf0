"""Reading a configuration: types, unread keys, and every tensor that does not fit, named before weights are read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from pagoda.hal.errors import CheckpointError, ConfigError, ModelError
from pagoda.hal.info import DeviceInfo
from pagoda.hal.table import KernelTable
from pagoda.models.config import Config
from pagoda.models.direct import DirectRun
from pagoda.models.load import Checkpoint, describe, load_model, open_checkpoint
from pagoda.models.loading.memory_source import MemorySource
from pagoda.models.parallel.shard import Shard
from pagoda.models.rope import LinearScaling, YarnScaling
from pagoda.models.spec import Window
from safetensors.torch import load_file
from spec_samples import opened
from tiny_checkpoints import make

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "vocab_size": 33, "hidden_act": "silu",
    "max_position_embeddings": 64, "eos_token_id": [7, 9],
}  # fmt: skip


def checkpoint(tensors: Mapping[str, torch.Tensor], **changes: Any) -> Checkpoint:
    return Checkpoint({**LLAMA, **changes}, {}, lambda: MemorySource(tensors), "test")


def weights() -> dict[str, torch.Tensor]:
    found = {"model.embed_tokens.weight": torch.randn(33, 16), "model.norm.weight": torch.ones(16), "lm_head.weight": torch.randn(33, 16)}
    for i in range(2):
        at = f"model.layers.{i}"
        shapes = {"self_attn.q_proj": (16, 16), "self_attn.k_proj": (8, 16), "self_attn.v_proj": (8, 16), "self_attn.o_proj": (16, 16)}
        shapes |= {"mlp.gate_proj": (24, 16), "mlp.up_proj": (24, 16), "mlp.down_proj": (16, 24)}
        shapes |= {"input_layernorm": (16,), "post_attention_layernorm": (16,)}
        found |= {f"{at}.{name}.weight": torch.randn(shape) for name, shape in shapes.items()}
    return found


def test_an_unread_key_is_named() -> None:
    with pytest.raises(ModelError, match=r"keys that this model type does not know: logit_magic, rope_scaling.wobble"):
        describe({**LLAMA, "logit_magic": 3, "rope_scaling": {"rope_type": "linear", "factor": 2.0, "wobble": 1}})


def test_null_and_harmless_keys_pass() -> None:
    assert describe({**LLAMA, "logit_magic": None, "initializer_range": 0.02, "use_cache": True}).spec == describe(LLAMA).spec


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": "16"}, "hidden_size must be an integer, found '16'"),
        ({"hidden_size": True}, "hidden_size must be an integer, found True"),
        ({"attention_bias": 1}, "attention_bias must be true or false, found 1"),
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"hidden_act": "swigloo"}, "hidden_act='swigloo' is not implemented; known: silu"),
        ({"rope_scaling": {"type": "spiral"}}, "rope_type='spiral' is not implemented; known: default, linear"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries for 2 layers"),
        ({"layer_types": ["full_attention", "mamba"]}, "layer_types holds mamba"),
        ({"architectures": ["NovelForCausalLM"]}, "no model family serves NovelForCausalLM; there are .*LlamaForCausalLM"),
    ],
)
def test_what_cannot_be_read_is_said(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        describe({**LLAMA, **changes})


def test_a_model_type_serves_where_no_architecture_is_named() -> None:
    config = {key: value for key, value in LLAMA.items() if key != "architectures"}
    assert describe(config).spec == describe(LLAMA).spec
    assert describe(config).facts.architecture == "llama"


def test_facts_before_weights() -> None:
    facts = describe(checkpoint(weights()), dtype="float32").facts
    assert (facts.vocab_size, facts.width, facts.max_positions, facts.eos_ids) == (33, 16, 64, (7, 9))
    assert facts.parameters == sum(tensor.numel() for tensor in weights().values())
    assert facts.weight_bytes == 4 * facts.parameters


def test_weight_bytes_are_those_that_a_rank_loads() -> None:
    device, table = opened()
    for world in (1, 2):
        description = describe(checkpoint(weights()), dtype="float32", shard=Shard(0, world))
        assert load_model(description, device, table).loaded.nbytes == description.facts.weight_bytes


def test_tied_heads_are_counted_and_kept_once() -> None:
    tensors = weights()
    del tensors["lm_head.weight"]
    tied = describe(checkpoint(tensors, tie_word_embeddings=True), dtype="float32")
    untied = describe(checkpoint(weights()), dtype="float32")
    assert untied.facts.weight_bytes - tied.facts.weight_bytes == 33 * 16 * 4
    device, table = opened()
    model = load_model(tied, device, table)
    assert model.loaded.nbytes == tied.facts.weight_bytes
    assert model.spec.head.tied


def test_every_tensor_that_does_not_fit_is_named_at_once() -> None:
    tensors = weights()
    del tensors["model.norm.weight"], tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.layers.0.self_attn.k_proj.weight"] = torch.randn(4, 16)
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.randn(16)
    tensors["model.vision.weight"] = torch.randn(4)
    with pytest.raises(CheckpointError) as error:
        describe(checkpoint(tensors))
    message = str(error.value)
    for part in (
        "2 missing: layers.1.ff.up.weight [24, 16], norm.weight [16]",
        "2 unexpected: ",
        "model.layers.0.self_attn.q_proj.bias",
        "model.vision.weight",
        "1 misshapen: layers.0.mixer.k.weight [4, 16], expected [8, 16]",
    ):
        assert part in message


def test_rope_in_both_spellings() -> None:
    newer = {"rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "original_max_position_embeddings": 32}}
    older = {"rope_theta": 5e5, "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}}
    spec = describe({**LLAMA, **newer}).spec
    assert spec == describe({**LLAMA, **older}).spec
    assert isinstance(spec.layers[0].mixer.position.scaling, YarnScaling)
    assert spec.max_positions == 128


def test_linear_scaling_stretches_what_positions_allow() -> None:
    spec = describe({**LLAMA, "rope_scaling": {"type": "linear", "factor": 2}}).spec
    assert spec.layers[0].mixer.position.scaling == LinearScaling(2.0)
    assert spec.max_positions == 128


def test_gemma_patterns_of_layers_in_all_spellings() -> None:
    gemma = {**LLAMA, "architectures": ["Gemma3ForCausalLM"], "head_dim": 4, "sliding_window": 8, "num_hidden_layers": 4,
             "hidden_activation": "gelu_pytorch_tanh"}  # fmt: skip
    window = Window("sliding", 8)
    by_period = [layer.mixer.window for layer in describe({**gemma, "sliding_window_pattern": 2}).spec.layers]
    types = ["sliding_attention", "full_attention"] * 2
    listed = [layer.mixer.window for layer in describe({**gemma, "layer_types": types}).spec.layers]
    assert by_period == listed == [window, None, window, None]


def test_a_split_that_does_not_divide_is_refused_with_those_that_do() -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size=3 does not divide 4 attention heads; use one of 1, 2, 4"):
        describe(LLAMA, shard=Shard(0, 3))


def test_fewer_kv_heads_than_ranks_are_repeated() -> None:
    spans = [Shard(rank, 4).kv_heads(2).part for rank in range(4)]
    assert spans == [range(0, 1), range(0, 1), range(1, 2), range(1, 2)]


def test_every_primitive_without_a_kernel_is_named() -> None:
    info: DeviceInfo = opened()[1].info
    with pytest.raises(ModelError, match=r"(?s)cannot run this model: no kernel for embedding.*no kernel for gemm.*no kernel for rms_norm"):
        describe(LLAMA, table=KernelTable(info, ()))


def test_dtype_follows_the_checkpoint_then_the_device() -> None:
    assert describe({**LLAMA, "torch_dtype": "float16"}).numerics.dtype == "float16"
    assert describe({**LLAMA, "dtype": "bfloat16"}, dtypes=("float32",)).numerics.dtype == "float32"
    assert describe({**LLAMA, "dtype": "bfloat16"}, dtype="float32").numerics.kv_dtype == "float32"


def test_a_folder_without_a_model_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no config.json and is no GGUF file"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{broken")
    with pytest.raises(CheckpointError, match="is not JSON"):
        open_checkpoint(tmp_path)


def test_dummy_weights_need_the_configuration_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    device, table = opened()
    description = describe(open_checkpoint(tmp_path, "dummy"), dtype="float32", table=table)
    assert not description.stored
    model = load_model(description, device, table)
    hidden = torch.randn(2, 16)
    assert torch.equal(model.logits(hidden), load_model(description, device, table).logits(hidden))
    assert not torch.equal(model.logits(hidden), load_model(description, device, table, seed=1).logits(hidden))


def test_refill_reads_the_weights_into_the_same_places() -> None:
    tensors = weights()
    device, table = opened()
    model = load_model(describe(checkpoint(tensors), dtype="float32"), device, table)
    hidden = torch.randn(3, 16)
    before = model.logits(hidden).clone()
    tensors["lm_head.weight"].mul_(2)
    model.refill()
    assert torch.allclose(model.logits(hidden), before * 2)


@pytest.mark.parametrize("name", ["Mamba2", "Rwkv"])
def test_refill_reads_what_a_convolution_packed_too(name: str, tmp_path: Path) -> None:
    sizes = {"num_heads": 4, "head_dim": 16, "n_groups": 1, "state_size": 8, "expand": 2}
    make(tmp_path, name, **(sizes if name == "Mamba2" else {"attention_hidden_size": 48, "intermediate_size": 80, "rescale_every": 0}))
    config, tensors = json.loads((tmp_path / "config.json").read_text()), load_file(tmp_path / "model.safetensors")
    device, table = opened()
    source = Checkpoint(config, {}, lambda: MemorySource(tensors), "test")
    model = load_model(describe(source, dtype="float32"), device, table)
    generator = torch.Generator().manual_seed(1)
    for tensor in tensors.values():
        tensor.copy_(torch.rand(tensor.shape, generator=generator))
    model.refill()
    fresh = load_model(describe(source, dtype="float32"), device, table)
    hidden = [DirectRun(each, device, 1, 32).step([(0, [3, 5, 9, 4])]).hidden for each in (model, fresh)]
    torch.testing.assert_close(*hidden)


def test_reader_counts_nested_keys_once_read() -> None:
    config = Config({"a": 1, "nested": {"b": 2.5, "c": [1, 2]}, "left": 3})
    nested = config.child("nested")
    assert nested is not None
    assert (config.integer("a"), nested.number("b"), nested.list("c", kind=int)) == (1, 2.5, (1, 2))
    assert config.unread() == ("left",)
