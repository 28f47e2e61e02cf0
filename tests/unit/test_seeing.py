"""Native language models under transformers' towers: what that brings (adapters, float8, ranks), and what stays the bridge's."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from lora_folders import make_adapter
from pagoda.hal.errors import ModelError, RequestError
from pagoda.models.checkpoint import Transpose, apply
from pagoda.models.decoder import ropes_in
from pagoda.models.load import describe, open_checkpoint, support_of
from pagoda.models.loading.memory_source import MemoryTensor
from pagoda.models.rope import Rope, RopeTable
from pagoda.models.spec import DecoderSpec
from pagoda.ops.linear_fp8 import dequantised, quantised
from pagoda.serving.engine.params import SamplingParams
from pagoda.serving.frontend.lora import LoRARequest
from pagoda.serving.sdk import LLM
from safetensors.torch import load_file, save_file
from tiny_vision import KINDS, greedy, inputs, make_vision

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def answer(folder: Path, name: str, lora: LoRARequest | None = None, **options: Any) -> list[int]:
    ids, tensors = inputs(name, 1)
    settings = {"dtype": "float32", "max_model_len": 64, "kv_cache_memory_bytes": 8 << 20, "skip_tokenizer_init": True, **options}
    with LLM(str(folder), device="cpu", **settings) as llm:
        prompt = {"prompt_token_ids": ids, "multi_modal_data": {"processed": tensors}}
        (output,) = llm.generate([prompt], GREEDY, use_tqdm=False, lora_request=lora)
        return list(output.outputs[0].token_ids)


def want(model: torch.nn.Module, name: str) -> list[int]:
    return greedy(model, *inputs(name, 1), 12)


@pytest.mark.parametrize("name", KINDS)
def test_language_models_that_a_family_knows_are_native(name: str, tmp_path: Path) -> None:
    make_vision(tmp_path, name)
    checkpoint = open_checkpoint(tmp_path)
    native = name != "Lfm3Vl"
    assert support_of(checkpoint.config) == ("native" if native else "bridge")
    assert (describe(checkpoint).sees is not None) == native
    assert describe(checkpoint, model_impl="transformers").sees is None
    if native:
        assert describe(checkpoint, model_impl="pagoda").sees is not None
    else:
        with pytest.raises(ModelError, match="no model family serves"):
            describe(checkpoint, model_impl="pagoda")


@pytest.mark.parametrize("name", ["Qwen2VL", "Qwen3VL", "Gemma3"])
def test_the_bridge_answers_the_same(name: str, tmp_path: Path) -> None:
    model = make_vision(tmp_path, name)
    assert answer(tmp_path, name, model_impl="transformers") == want(model, name)


def test_what_the_family_does_not_know_runs_by_the_bridge(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A language model with several positions a token whose configuration says nothing of their sections."""
    make_vision(tmp_path, "Qwen2VL")
    config = dict(open_checkpoint(tmp_path).config)
    text = {**config["text_config"], "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    assert describe({**config, "text_config": text}).family is None
    assert "runs through transformers as well" in caplog.text


OLDER: dict[str, tuple[dict[str, Any], tuple[int, int, int], tuple[int, ...], bool]] = {
    "llava": (
        {
            "architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "image_token_index": 32000,
            "text_config": {"_name_or_path": "vicuna", "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 4096,
                            "model_type": "llama", "rms_norm_eps": 1e-5, "torch_dtype": "float16", "vocab_size": 32064},
            "vision_config": {"model_type": "clip_vision_model", "hidden_size": 1024, "image_size": 336, "intermediate_size": 4096,
                              "num_attention_heads": 16, "num_hidden_layers": 24, "patch_size": 14, "projection_dim": 768},
        },
        (4096, 32, 32064), (), False,
    ),
    "qwen2.5-vl": (
        {
            "architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl", "image_token_id": 151655,
            "vision_start_token_id": 151652, "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 11008,
            "max_position_embeddings": 128000, "max_window_layers": 70, "num_attention_heads": 16, "num_hidden_layers": 36,
            "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "sliding_window": 32768, "tie_word_embeddings": True,
            "use_sliding_window": False, "vocab_size": 151936, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
            "vision_config": {"depth": 2, "hidden_size": 1280, "num_heads": 16, "in_chans": 3, "out_hidden_size": 2048},
        },
        (2048, 36, 151936), (16, 24, 24), True,
    ),
    "gemma3": (
        {
            "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "image_token_index": 262144,
            "text_config": {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
                            "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024},
            "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 1152, "image_size": 896, "intermediate_size": 4304,
                              "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14},
        },
        (2560, 34, 262208), (), True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OLDER)
def test_what_older_files_leave_out_or_lay_flat_is_known(name: str) -> None:
    config, sizes, sections, tied = OLDER[name]
    description = describe(config)
    spec = description.spec
    assert description.sees is not None and isinstance(spec, DecoderSpec)
    assert (spec.width, len(spec.layers), spec.vocab) == sizes and spec.head.tied == tied
    assert {rope.sections for rope in ropes_in(spec.layers)} == {sections}


@pytest.mark.parametrize(("name", "scale"), [("Cohere2Vision", 1.0), ("GraniteDocling", 1 / 4)])
def test_logits_are_scaled_where_the_whole_model_scales_them(name: str, scale: float) -> None:
    """Cohere's are where the text model is alone, and not under transformers' tower."""
    config = getattr(transformers, f"{name}Config")().to_dict() | {"architectures": [f"{name}ForConditionalGeneration"]}
    spec = describe(config).spec
    assert isinstance(spec, DecoderSpec) and spec.head.scale == scale


def test_adapters_change_the_language_model(tmp_path: Path) -> None:
    model = make_vision(tmp_path / "base", "Llava")
    modules = {
        f"model.language_model.layers.{i}.{part}": tuple(model.get_submodule(f"model.language_model.layers.{i}.{part}").weight.shape)
        for i in range(2)
        for part in ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj")
    }
    adapter = make_adapter(tmp_path / "adapter", modules, 3, strength=0.5)
    plain, room = want(model, "Llava"), {"enable_lora": True, "max_loras": 1}
    stored = load_file(adapter / "adapter_model.safetensors")
    with torch.no_grad():
        for name in modules:
            down, up = (stored[f"base_model.model.{name}.lora_{side}.weight"] for side in "AB")
            model.get_submodule(name).weight.add_(2 * up @ down)
    changed = want(model, "Llava")
    assert changed != plain
    assert answer(tmp_path / "base", "Llava", LoRARequest("one", 1, str(adapter)), **room) == changed
    assert answer(tmp_path / "base", "Llava", **room) == plain
    tower = make_adapter(tmp_path / "tower", {"model.vision_tower.encoder.layers.0.self_attn.q_proj": (32, 32)}, 2)
    with pytest.raises(RequestError, match="no part of the language model"):
        answer(tmp_path / "base", "Llava", LoRARequest("two", 2, str(tower)), **room)


@pytest.mark.parametrize("name", ["Llava", "Qwen3VL"])
def test_the_language_model_is_converted_to_float8_and_the_tower_is_not(name: str, tmp_path: Path) -> None:
    model = make_vision(tmp_path, name)
    with torch.no_grad():
        for path, weight in model.named_parameters():
            if "language_model.layers" in path and "_proj" in path and weight.dim() == 2:
                weight.copy_(dequantised(*quantised(weight), 0))
    assert answer(tmp_path, name, quantization="fp8") == want(model, name)


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["Qwen3VL", "Gemma3"])
def test_two_ranks_answer_the_same(name: str, tmp_path: Path) -> None:
    model = make_vision(tmp_path, name)
    assert answer(tmp_path, name, tensor_parallel_size=2) == want(model, name)


def test_experts_are_read_in_either_direction(tmp_path: Path) -> None:
    model = make_vision(tmp_path / "one", "Qwen3VLMoe")
    shutil.copytree(tmp_path / "one", tmp_path / "other")
    tensors = load_file(tmp_path / "one/model.safetensors")
    turned = {name: t.transpose(1, 2).contiguous() if ".mlp.experts." in name else t for name, t in tensors.items()}
    assert any(turned[name].shape != tensors[name].shape for name in tensors)
    save_file(turned, tmp_path / "other/model.safetensors", {"format": "pt"})
    assert answer(tmp_path / "one", "Qwen3VLMoe") == answer(tmp_path / "other", "Qwen3VLMoe") == want(model, "Qwen3VLMoe")


def test_a_tensor_is_turned_until_it_lies_as_wanted() -> None:
    numbers = torch.arange(6.0).view(1, 2, 3)
    for stored in (numbers, numbers.transpose(1, 2)):
        (found,) = apply([Transpose("a", until=(2, 3))], {"a": MemoryTensor("a", stored.contiguous())}).values()
        assert torch.equal(found.read(), numbers)


@pytest.mark.parametrize(("woven", "axes"), [(False, [0, 0, 0, 1, 1, 2]), (True, [0, 1, 2, 0, 1, 0])])
def test_each_frequency_follows_the_position_of_its_section(woven: bool, axes: list[int]) -> None:
    sections = (3, 2, 1)
    positions = torch.tensor([[3, 9], [20, 1], [7, 30]])
    cos, sin = RopeTable(Rope(1e4, 12, sections=sections, woven=woven), 64, torch.device("cpu")).at(positions, None)
    for token in range(2):
        for i, axis in enumerate(axes):
            angle = torch.tensor(float(positions[axis, token]) * 1e4 ** (-2 * i / 12))
            torch.testing.assert_close(torch.stack([cos[token, i], sin[token, i]]), torch.stack([angle.cos(), angle.sin()]))
