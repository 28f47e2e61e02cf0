"""Writes a transformers model as a GGUF file, the way llama.cpp's converter lays it out; written from the format's description."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import torch
from transformers import PreTrainedModel

ROOT = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "model.final_layernorm": "output_norm",
    "lm_head": "output",
    "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd",
    "transformer.ln_f": "output_norm",
}
LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "mlp.gate": "ffn_gate_inp",
    "ln_1": "attn_norm",
    "ln_2": "ffn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
    "self_attn.dense": "attn_output",
    "mlp.fc1": "ffn_up",
    "mlp.fc2": "ffn_down",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "block_sparse_moe.router": "ffn_gate_inp",
}
GEMMA_LAYER = LAYER | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
OTHER_LAYERS = {
    "gemma2": GEMMA_LAYER,
    "gemma3": GEMMA_LAYER,
    "olmo2": LAYER | {"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"},
    "gpt-oss": LAYER | {"post_attention_layernorm": "post_attention_norm", "mlp.router": "ffn_gate_inp"},
}
ARCHITECTURES = {
    "mistral": "llama",
    "mixtral": "llama",
    "gemma3_text": "gemma3",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "phi": "phi2",
    "cohere": "command-r",
    "gpt_oss": "gpt-oss",
}


def rounded(weight: torch.Tensor, kind: str) -> torch.Tensor:
    """What is left of a matrix's numbers after being stored as `kind`."""
    code = gguf.GGMLQuantizationType[kind]
    return torch.from_numpy(gguf.dequantize(gguf.quantize(weight.numpy(), code), code).copy())


def round_model(model: PreTrainedModel, kind: str) -> None:
    """Replace the weights of a model by what `write_gguf` keeps of them."""
    plain = ("mlp.gate.weight", "expert_gate.weight", "router.weight", "bias", "wpe.weight")
    with torch.no_grad():
        for name, weight in model.state_dict().items():
            if weight.dim() >= 2 and not name.endswith(plain):
                turned = type(_module(model, name)).__name__ == "Conv1D" or (".experts." in name and model.config.model_type == "gpt_oss")
                weight.copy_(rounded(weight.mT.contiguous(), kind).mT if turned else rounded(weight, kind))


def write_gguf(model: PreTrainedModel, path: Path, kind: str = "F32", *, max_tensors: int = 0, leave_out: tuple[str, ...] = ()) -> Path:
    """Matrices are stored as `kind`, vectors, routers and learned positions as float32; returns the (first) file."""
    config = model.config
    architecture = ARCHITECTURES.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=max_tensors)
    _metadata(writer, config, architecture)
    for name, tensor in _tensors(model, architecture):
        if name in leave_out:
            continue
        plain = tensor.ndim < 2 or any(word in name for word in ("ffn_gate_inp", "position_embd", "_norm", "bias", "sinks"))
        code = gguf.GGMLQuantizationType["F32" if plain else kind]
        writer.add_tensor(name, gguf.quantize(tensor, code), raw_dtype=code)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path if path.exists() else sorted(path.parent.glob(f"{path.stem}-00001-of-*.gguf"))[0]


def hub_name(name: str) -> str:
    """The name that a tensor of a Llama file has on the hub."""
    stem, _, kind = name.rpartition(".")
    if not stem.startswith("blk."):
        return f"{next(theirs for theirs, ours in ROOT.items() if ours == stem)}.{kind}"
    _, layer, inner = stem.split(".")
    return f"model.layers.{layer}.{next(theirs for theirs, ours in LAYER.items() if ours == inner)}.{kind}"


def _module(model: PreTrainedModel, name: str) -> torch.nn.Module:
    return model.get_submodule(name.rpartition(".")[0])


def _metadata(writer: gguf.GGUFWriter, config, architecture: str) -> None:
    heads = config.num_attention_heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(heads)
    writer.add_tokenizer_model("none")
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if architecture == "gpt2":
        writer.add_feed_forward_length(4 * config.hidden_size)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
        return
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count_kv(config.num_key_value_heads)
    rms = getattr(config, "rms_norm_eps", None)
    if rms is not None:
        writer.add_layer_norm_rms_eps(rms)
    else:
        writer.add_layer_norm_eps(getattr(config, "layer_norm_eps", None) or config.norm_epsilon)
    writer.add_vocab_size(config.vocab_size)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    _rope(writer, config, head_dim)
    _extras(writer, config, architecture)


def _rope(writer: gguf.GGUFWriter, config, head_dim: int) -> None:
    rope = config.rope_parameters
    main = rope.get("full_attention", rope)
    writer.add_rope_freq_base(float(main["rope_theta"]))
    writer.add_rope_dimension_count(int(head_dim * main.get("partial_rotary_factor", 1.0)))
    kind = main.get("rope_type", "default")
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(main["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(main["original_max_position_embeddings"])
    if kind == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_factors(main, head_dim))
    if kind == "longrope":
        for length in ("short", "long"):
            writer.add_tensor(f"rope_factors_{length}.weight", np.array(main[f"{length}_factor"], np.float32))
        writer.add_rope_scaling_orig_ctx_len(main["original_max_position_embeddings"])


def _llama3_factors(rope: dict, head_dim: int) -> np.ndarray:
    """Divisors of the frequencies, one dimension after the other."""
    factors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * np.pi * rope["rope_theta"] ** (i / head_dim)
        longest, shortest = (rope["original_max_position_embeddings"] / rope[f"{end}_freq_factor"] for end in ("low", "high"))
        if wavelength < shortest:
            factors.append(1.0)
        elif wavelength > longest:
            factors.append(rope["factor"])
        else:
            turns = rope["original_max_position_embeddings"] / wavelength
            smooth = (turns - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, np.float32)


def _extras(writer: gguf.GGUFWriter, config, architecture: str) -> None:
    if architecture in ("gemma2", "gemma3"):
        writer.add_sliding_window(config.sliding_window)
        writer.add_float32(f"{architecture}.attention.scale", config.query_pre_attn_scalar**-0.5)
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if architecture == "phi3" and config.sliding_window:
        writer.add_sliding_window(config.sliding_window)
    if architecture in ("granite", "granitemoe"):
        writer.add_float32(f"{architecture}.attention.scale", config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if architecture in ("command-r", "cohere2"):
        writer.add_logit_scale(config.logit_scale)
    if architecture in ("cohere2", "gpt-oss"):
        writer.add_sliding_window(config.sliding_window)
    if architecture == "stablelm":
        writer.add_parallel_residual(config.use_parallel_residual)
    if getattr(config, "shared_expert_intermediate_size", None):
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(getattr(config, "moe_intermediate_size", config.intermediate_size))


def _tensors(model: PreTrainedModel, architecture: str) -> Iterator[tuple[str, np.ndarray]]:
    tied = model.config.tie_word_embeddings
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and tied:
            continue
        tensor = _laid_out(model, name, tensor.float(), architecture)
        for theirs, values in _named(name, tensor, architecture):
            squeezed = values.squeeze() if "shexp" in theirs else values
            yield theirs, np.ascontiguousarray(squeezed.numpy())


def _named(name: str, tensor: torch.Tensor, architecture: str) -> Iterator[tuple[str, torch.Tensor]]:
    stem, _, kind = name.rpartition(".")
    match = re.fullmatch(r"(?:model\.layers|transformer\.h)\.(\d+)\.(.+)", name)
    if match is None:
        yield f"{ROOT[stem]}.{kind}", tensor
        return
    layer, inner = match[1], match[2]
    if architecture == "gpt-oss" and ".experts." in inner:
        yield from _gpt_oss_experts(layer, inner, tensor)
    elif inner.endswith(("experts.gate_up_proj", "input_linear.weight")):
        gate, up = tensor.chunk(2, dim=1)
        yield f"blk.{layer}.ffn_gate_exps.weight", gate
        yield f"blk.{layer}.ffn_up_exps.weight", up
    elif inner.endswith(("experts.down_proj", "output_linear.weight")):
        yield f"blk.{layer}.ffn_down_exps.weight", tensor
    elif inner == "self_attn.sinks":
        yield f"blk.{layer}.attn_sinks.weight", tensor
    else:
        table = OTHER_LAYERS.get(architecture, LAYER)
        yield f"blk.{layer}.{table[inner.rpartition('.')[0]]}.{kind}", tensor


def _gpt_oss_experts(layer: str, inner: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Inputs before outputs there, gate and up of an output side by side."""
    kind = "bias" if inner.endswith("bias") else "weight"
    rows = tensor if kind == "bias" else tensor.transpose(1, 2)
    if "gate_up" in inner:
        yield f"blk.{layer}.ffn_gate_exps.{kind}", rows[:, 0::2]
        yield f"blk.{layer}.ffn_up_exps.{kind}", rows[:, 1::2]
    else:
        yield f"blk.{layer}.ffn_down_exps.{kind}", rows


def _laid_out(model: PreTrainedModel, name: str, tensor: torch.Tensor, architecture: str) -> torch.Tensor:
    if type(_module(model, name)).__name__ == "Conv1D" and tensor.dim() == 2:
        return tensor.T
    if architecture.startswith("gemma") and "norm" in name:
        return tensor + 1
    if architecture in ("llama", "smollm3", "granite", "granitemoe") and re.search(r"self_attn\.[qk]_proj", name):
        heads = model.config.num_attention_heads if "q_proj" in name else model.config.num_key_value_heads
        return _interleaved(tensor, heads)
    return tensor


def _interleaved(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of each head's first and second half take turns."""
    per_head = tensor.shape[0] // heads
    out = torch.empty_like(tensor)
    for head in range(heads):
        rows = tensor[head * per_head : (head + 1) * per_head]
        out[head * per_head : (head + 1) * per_head : 2] = rows[: per_head // 2]
        out[head * per_head + 1 : (head + 1) * per_head : 2] = rows[per_head // 2 :]
    return out
