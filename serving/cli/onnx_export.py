"""A model as an ONNX graph: the step of a decoder with K and V as plain tensors, or an encoder with its pooling, traced over references."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import torch
from pagoda.hal.device import Device
from pagoda.hal.errors import ConfigError, ModelError
from pagoda.hal.info import DeviceInfo
from pagoda.hal.kv import LayerCache, LayerPages
from pagoda.hal.table import KernelTable
from pagoda.models.decoder import Decoder
from pagoda.models.load import Checkpoint, Description, describe, load_model
from pagoda.models.model import ModelInputs
from pagoda.models.pooling import Pooler
from pagoda.models.spec import MLA, Attention, Bidirectional, Both, Cross, DecoderSpec
from pagoda.ops.references import portable_kernels, reference_kernels
from pagoda.serving.cli.onnx_kernels import PlainBatch, PlainCache, plain_kernels

INLINE_BYTES = 2_000_000_000
"""Weights up to this size lie in the graph's own file; a protobuf holds no more than 2 GiB."""


@dataclass(frozen=True)
class Exported:
    """What was written. `inputs` and `outputs`: names in order; `files`: the graph and, of large models, its weights."""

    files: tuple[Path, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def open_for_export(checkpoint: Checkpoint, device: Device, dtype: str = "float32") -> tuple[Decoder, Description]:
    """Load the model with kernels that can be traced. Raises `ModelError` naming what has no form in ONNX."""
    table = export_table(device.info)
    description = describe(checkpoint, dtype=dtype, table=table)
    _check(description)
    return cast(Decoder, load_model(description, device, table)), description


def export_table(info: DeviceInfo) -> KernelTable:
    """References, attention without pages, and weights of few bits as the numbers that they stand for."""
    dense = [one for one in portable_kernels() if one.name == "dequantised"]
    return KernelTable(info, (*(one for one in reference_kernels() if one.op not in _OWN), *dense, *plain_kernels()))


_OWN = frozenset({"write_kv", "paged_attention", "segment_attention", "moe_mlp", "embedding_gguf"})


def _check(description: Description) -> None:
    """Raises `ModelError` with every reason at once."""
    spec, name = description.spec, description.facts.architecture
    if not isinstance(spec, DecoderSpec):
        raise ModelError(f"{name} runs through transformers' own module, which Pagoda cannot export; optimum exports such modules")
    reasons = sorted({reason for layer in spec.layers for reason in _reasons(layer.mixer)})
    if spec.encoder is not None:
        reasons.append("it has an encoder beside its decoder")
    if description.facts.length_epochs is not None:
        reasons.append("its angles follow a request's length")
    if description.sees is not None:
        reasons.append("an encoder of images stands before it")
    if reasons:
        raise ModelError(f"{name} cannot be exported to ONNX: {'; '.join(reasons)}")


def _reasons(mixer: Any) -> list[str]:
    match mixer:
        case None | Attention() | Bidirectional():
            return []
        case MLA():
            return ["its attention (MLA) keeps latents and not K and V"]
        case Cross():
            return ["its decoder attends to an encoder's output"]
        case Both():
            return [f"its layers of attention beside {type(mixer.recurrent).__name__} keep a state that steps hand on"]
    return [f"its {type(mixer).__name__} layers keep a state that steps hand on"]


class DecoderStep(torch.nn.Module):
    """`(input_ids [B, S], attention_mask [B, P + S], position_ids [B, S], k and v of each layer [B, Hk, P, D])` → logits, k and v after."""

    def __init__(self, model: Decoder) -> None:
        super().__init__()
        self.model = model
        self.caches = [cache for cache in model.caches if cache is not None]

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, position_ids: torch.Tensor, past: list[torch.Tensor]) -> Any:
        layers = [PlainCache(k, v) for k, v in zip(past[::2], past[1::2], strict=True)]
        _bind(self.model, layers)
        hidden = _run(self.model, input_ids, attention_mask, position_ids)
        logits = self.model.logits(hidden).unflatten(0, (input_ids.shape[0], -1))
        return logits, [tensor for layer in layers for tensor in (layer.k, layer.v)]


class EncoderStep(torch.nn.Module):
    """`(input_ids [B, S], attention_mask [B, S], token_type_ids [B, S])` → hidden states `[B, S, W]`, pooled answer `[B, outputs]`."""

    def __init__(self, model: Decoder, pooler: Pooler) -> None:
        super().__init__()
        self.model, self.pooler = model, pooler

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, token_type_ids: torch.Tensor | None = None) -> Any:
        positions = (attention_mask.long().cumsum(1) - 1).clamp(min=0)
        types = None if token_type_ids is None else token_type_ids.flatten()
        rows, dtype = input_ids.shape[0], getattr(torch, self.model.facts.dtype)
        caches = [cache for cache in self.model.caches if cache is not None]
        _bind(self.model, [PlainCache(*(torch.zeros(rows, c.heads, 0, dim, dtype=dtype) for dim in (c.k_dim, c.v_dim))) for c in caches])
        hidden = _run(self.model, input_ids, attention_mask, positions, types).unflatten(0, (input_ids.shape[0], -1))
        return hidden, _answer(self.model, self.pooler, hidden, attention_mask)


def _bind(model: Decoder, layers: list[PlainCache]) -> None:
    """Each layer that stores something gets a cache in the place of its pages."""
    left: Any = iter(layers)
    given = [None if cache is None else LayerPages(own := next(left), own) for cache in model.caches]
    model.bind(given, [0] * len(given), [16])


def _run(model: Decoder, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, types: torch.Tensor | None = None) -> torch.Tensor:
    batch: Any = PlainBatch(mask.bool(), positions)
    return model.forward(ModelInputs(ids.flatten(), positions.flatten(), (batch,), segments=batch, types=types)).hidden


def _answer(model: Decoder, pooler: Pooler, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    chosen = _chosen(pooler, hidden, mask)
    scores = model.pool(chosen.flatten(0, -2)).unflatten(0, chosen.shape[:-1])
    if pooler.task == "embed":
        return torch.nn.functional.normalize(scores, dim=-1) if pooler.normalize else scores
    activations = {"softmax": lambda x: x.softmax(-1), "sigmoid": torch.sigmoid, "none": lambda x: x}
    return activations[pooler.activation](scores)


def _chosen(pooler: Pooler, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """`[B, W]`, or all states `[B, S, W]` where each token is answered."""
    real = mask.to(hidden.dtype)
    order = torch.arange(mask.shape[1], device=mask.device)
    if pooler.kind == "mean":
        return (hidden * real[:, :, None]).sum(1) / real.sum(1, keepdim=True)
    if pooler.kind == "all":
        return hidden
    at = (order * mask).argmax(1) if pooler.kind == "last" else mask.argmax(1)
    return hidden.gather(1, at[:, None, None].expand(-1, 1, hidden.shape[-1])).squeeze(1)


def export(model: Decoder, description: Description, path: Path) -> Exported:
    """Write the graph to `path`. Batch, tokens of the step and of the past are free. Raises `ConfigError` where a package is missing."""
    if find_spec("onnxscript") is None:  # torch's exporter stands on it
        raise ConfigError("the ONNX exporter needs packages that are not installed: pip install 'pagoda-llm[export]'")
    pooler = model.facts.pooler
    step = DecoderStep(model).eval() if pooler is None else EncoderStep(model, pooler).eval()
    inputs, names, axes = _decoder_inputs(step) if isinstance(step, DecoderStep) else _encoder_inputs(model)
    outputs = _outputs(step)
    large = description.facts.weight_bytes > INLINE_BYTES
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's exporter warns of its own insides
        program = torch.onnx.export(
            step, inputs, dynamo=True, input_names=list(names), output_names=list(outputs), dynamic_shapes=axes, verbose=False
        )
    assert program is not None
    program.save(str(path), external_data=large)
    weights = path.with_name(path.name + ".data")
    return Exported((path, *([weights] if weights.is_file() else [])), names, outputs)


def _decoder_inputs(step: DecoderStep) -> tuple[Any, tuple[str, ...], Any]:
    rows, new, past = 2, 3, 4
    free = {name: torch.export.Dim(name) for name in ("batch", "tokens", "past", "total")}
    ids = torch.zeros(rows, new, dtype=torch.int64)
    mask = torch.ones(rows, past + new, dtype=torch.int64)
    positions = torch.arange(past, past + new).expand(rows, -1).contiguous()
    caches = [tensor for cache in step.caches for tensor in _empty(cache, rows, past, step.model.facts.dtype)]
    axes = ({0: free["batch"], 1: free["tokens"]}, {0: free["batch"], 1: torch.export.Dim.DYNAMIC}, {0: free["batch"], 1: free["tokens"]},
            [{0: free["batch"], 2: free["past"]} for _ in caches])  # fmt: skip
    names = ("input_ids", "attention_mask", "position_ids", *_cache_names(len(step.caches), "past_key_values"))
    return (ids, mask, positions, caches), names, axes


def _empty(cache: LayerCache, rows: int, past: int, dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    kind = getattr(torch, dtype)
    return torch.zeros(rows, cache.heads, past, cache.k_dim, dtype=kind), torch.zeros(rows, cache.heads, past, cache.v_dim, dtype=kind)


def _encoder_inputs(model: Decoder) -> tuple[Any, tuple[str, ...], Any]:
    free = {0: torch.export.Dim("batch"), 1: torch.export.Dim("tokens")}
    count = 3 if model.facts.types else 2
    ids = [torch.zeros(2, 5, dtype=torch.int64), torch.ones(2, 5, dtype=torch.int64), torch.zeros(2, 5, dtype=torch.int64)]
    names = ("input_ids", "attention_mask", "token_type_ids")
    return tuple(ids[:count]), names[:count], (free,) * count


def _outputs(step: DecoderStep | EncoderStep) -> tuple[str, ...]:
    if isinstance(step, EncoderStep):
        return ("last_hidden_state", "sentence_embedding" if step.pooler.task == "embed" else "scores")
    return ("logits", *_cache_names(len(step.caches), "present"))


def _cache_names(layers: int, word: str) -> tuple[str, ...]:
    return tuple(f"{word}.{layer}.{part}" for layer in range(layers) for part in ("key", "value"))
