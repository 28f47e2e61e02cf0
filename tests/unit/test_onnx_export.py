"""Exported graphs in onnxruntime against the model itself: prompts, decode steps, padding on both sides, encoders with their pooling."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
import transformers
from pagoda.hal.discovery import find
from pagoda.hal.errors import ConfigError, ModelError
from pagoda.models.load import Checkpoint, open_checkpoint
from pagoda.serving.cli import onnx_export
from pagoda.serving.cli.onnx_export import export, open_for_export
from safetensors.torch import load_file
from tiny_checkpoints import logits, make

FEW = {"num_hidden_layers": 1}
DECODERS: dict[str, dict[str, Any]] = {
    "Llama": FEW,
    "Gemma3": {**FEW, "head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8, "layer_types": ["sliding_attention"]},
    "Mixtral": {**FEW, "num_local_experts": 4, "num_experts_per_tok": 2},
}
"""Grouped queries; norms of q and k, a window; experts."""
MORE_DECODERS: dict[str, dict[str, Any]] = {
    "GPTNeoX": FEW,
    "Gemma2": {"head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8},
    "Bloom": {"hidden_size": 32, "n_head": 4, "n_layer": 1},
    "GptOss": {**FEW, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "layer_types": ["sliding_attention"],
               "sliding_window": 4, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
}  # fmt: skip
"""Part of a head turned; soft caps, a layer with a window and one without; slopes by distance; sinks, and experts with biases."""
PROMPTS = ([5, 6, 7, 8, 9, 10, 11], [12, 13, 14])


def session(path: Path) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])


def exported(folder: Path) -> tuple[onnxruntime.InferenceSession, onnx_export.Exported]:
    model, description = open_for_export(open_checkpoint(folder), find("reference").open(0))
    written = export(model, description, folder / "model.onnx")
    return session(folder / "model.onnx"), written


def wanted(model: torch.nn.Module, prompts: Sequence[Sequence[int]], more: Sequence[int]) -> list[np.ndarray]:
    """transformers' logits: of every prompt's tokens, then of each token that follows, `[rows, vocab]`."""
    whole = [logits(model, [*prompt, *more]).numpy() for prompt in prompts]
    steps = [np.concatenate([rows[: len(prompt)] for rows, prompt in zip(whole, prompts, strict=True)])]
    return steps + [np.stack([rows[len(prompt) + n] for rows, prompt in zip(whole, prompts, strict=True)]) for n in range(len(more))]


def padded(prompts: Sequence[Sequence[int]], left: bool) -> tuple[np.ndarray, np.ndarray]:
    width = max(map(len, prompts))
    ids, mask = np.zeros((len(prompts), width), np.int64), np.zeros((len(prompts), width), np.int64)
    for row, prompt in enumerate(prompts):
        place = slice(width - len(prompt), width) if left else slice(0, len(prompt))
        ids[row, place], mask[row, place] = prompt, 1
    return ids, mask


def empty_past(run: onnxruntime.InferenceSession, rows: int) -> dict[str, np.ndarray]:
    shapes = {one.name: one.shape for one in run.get_inputs() if one.name.startswith("past")}
    return {name: np.zeros((rows, shape[1], 0, shape[3]), np.float32) for name, shape in shapes.items()}


@pytest.mark.parametrize("family", [*DECODERS, *(pytest.param(name, marks=pytest.mark.heavy) for name in MORE_DECODERS)])
def test_a_decoder_answers_alike_step_after_step(family: str, tmp_path: Path) -> None:
    model = make(tmp_path, family, **(DECODERS | MORE_DECODERS)[family])
    run, written = exported(tmp_path)
    ids, mask = padded(PROMPTS, left=True)
    positions = (mask.cumsum(1) - 1).clip(0)
    feed = {"input_ids": ids, "attention_mask": mask, "position_ids": positions, **empty_past(run, 2)}
    want = wanted(model, PROMPTS, [3, 4])
    for step, token in enumerate((3, 4, None)):
        found, *present = run.run(None, feed)
        got = found[mask.astype(bool)] if step == 0 else found[:, 0]
        assert np.abs(got - want[step]).max() < 2e-4 * np.abs(want[step]).max()
        mask = np.concatenate([mask, np.ones((2, 1), np.int64)], 1)
        positions = positions[:, -1:] + 1
        past = {name.replace("present", "past_key_values"): value for name, value in zip(written.outputs[1:], present, strict=True)}
        feed = {"input_ids": np.full((2, 1), token or 0), "attention_mask": mask, "position_ids": positions, **past}


@pytest.mark.parametrize(
    "name", ["BertModel", "BertForSequenceClassification", pytest.param("Qwen3ForSequenceClassification", marks=pytest.mark.heavy)]
)
def test_what_pools_answers_alike(name: str, tmp_path: Path) -> None:
    scores = "Classification" in name
    reference = make(tmp_path, name, **({"num_labels": 3, "pad_token_id": 0} if scores else {}))
    run, written = exported(tmp_path)
    assert written.outputs == ("last_hidden_state", "scores" if scores else "sentence_embedding")
    ids, mask = padded(PROMPTS, left=False)
    types = {"token_type_ids": np.zeros_like(ids)} if "token_type_ids" in written.inputs else {}
    hidden, answer = run.run(None, {"input_ids": ids, "attention_mask": mask, **types})
    with torch.no_grad():
        want = reference(input_ids=torch.from_numpy(ids), attention_mask=torch.from_numpy(mask), output_hidden_states=True)
    states, real = want.hidden_states[-1].numpy(), mask.astype(bool)
    assert np.abs(hidden[real] - states[real]).max() < 2e-4 * np.abs(states[real]).max()
    if scores:
        assert np.abs(answer - want.logits.softmax(-1).numpy()).max() < 2e-4
    else:
        # Without a pooling of its own a bare encoder answers with one of these, of length 1.
        mean = (states * mask[:, :, None]).sum(1) / mask.sum(1, keepdims=True)
        last = states[[0, 1], mask.sum(1) - 1]
        units = [x / np.linalg.norm(x, axis=1, keepdims=True) for x in (mean, last, states[:, 0])]
        assert min(np.abs(answer - unit).max() for unit in units) < 2e-4


def test_large_weights_lie_beside_the_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, "Llama", **FEW)
    monkeypatch.setattr(onnx_export, "INLINE_BYTES", 1000)
    run, written = exported(tmp_path)
    graph, weights = written.files
    assert (graph.name, weights.name, run.get_outputs()[0].name) == ("model.onnx", "model.onnx.data", "logits")
    held = sum(tensor.numel() * 4 for tensor in load_file(tmp_path / "model.safetensors").values())
    assert weights.stat().st_size >= 0.9 * held


@pytest.mark.parametrize(
    ("name", "values", "reason"),
    [
        ("Mamba", {"state_size": 4}, "its Selective layers keep a state"),
        ("DeepseekV3", {"first_k_dense_replace": 2, "n_routed_experts": 4}, r"its attention \(MLA\) keeps latents"),
        ("T5ForConditionalGeneration", {"d_model": 32, "d_kv": 8, "num_heads": 4, "d_ff": 48}, "an encoder beside its decoder"),
    ],
)
def test_what_has_no_form_in_onnx_is_refused_with_the_reason(name: str, values: dict[str, Any], reason: str) -> None:
    model_class = getattr(transformers, name if hasattr(transformers, name) else f"{name}ForCausalLM")
    config = model_class.config_class(**values).to_dict() | {"architectures": [model_class.__name__]}
    with pytest.raises(ModelError, match=f"cannot be exported to ONNX: .*{reason}"):
        open_for_export(Checkpoint(config, {}, None, "config"), find("reference").open(0))


def test_a_model_that_transformers_runs_is_refused_by_name() -> None:
    config = transformers.XLMConfig().to_dict() | {"architectures": ["XLMWithLMHeadModel"]}
    with pytest.raises(ModelError, match="XLM"):
        open_for_export(Checkpoint(config, {}, None, "config"), find("reference").open(0))


def test_a_missing_package_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ConfigError, match=r"pip install 'pagoda-llm\[export\]'"):
        export(None, None, Path("model.onnx"))  # type: ignore[arg-type]
