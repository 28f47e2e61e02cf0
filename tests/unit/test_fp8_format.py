"""The fp8 number format: every spelling of scales, cuts through blocks, conversion while loading, and whole tiny models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from pagoda.hal.discovery import find
from pagoda.hal.errors import CheckpointError, ModelError
from pagoda.models.direct import DirectRun
from pagoda.models.load import describe, load_model, open_checkpoint
from pagoda.models.loading.memory_source import MemoryTensor
from pagoda.ops.cases.linear_fp8 import true_weights
from pagoda.ops.linear import GemmReference
from pagoda.ops.linear_fp8 import E4M3, GemmFp8Reference, dequantised, quantised
from pagoda.ops.moe import MoeMlpFacts
from pagoda.ops.moe_fp8 import MoeMlpFp8Facts, expert_numbers
from pagoda.ops.table import kernel_table
from pagoda.quant.format import ExpertsUse, FormatUse, LinearPart, LinearUse
from pagoda.quant.fp8 import Fp8Format
from pagoda.quant.registry import format_for
from safetensors.torch import save_file
from torch.nn import functional as F

BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
TENSOR = {"quant_method": "fp8", "activation_scheme": "static"}
CHANNEL = {
    "quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"],
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}},
}  # fmt: skip
PROMPT = [5, 3, 80, 22, 9, 41, 77]


def stored(config: dict[str, Any], weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """A weight as a checkpoint of this kind has it."""
    if config is BLOCKS:
        codes, scale = quantised(weight, 128)
        return {"weight": codes, "weight_scale_inv": scale}
    if config is TENSOR:
        scale = weight.abs().max() / 448
        return {"weight": (weight / scale).to(E4M3), "weight_scale": scale, "input_scale": torch.tensor(0.5)}
    codes, scale = quantised(weight)
    return {"weight": codes, "weight_scale": scale.unsqueeze(-1).bfloat16()}


def plain(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    scale = tensors.get("weight_scale_inv", tensors.get("weight_scale"))
    assert scale is not None
    if "weight_scale_inv" in tensors:
        return torch.from_numpy(true_weights(tensors["weight"], scale, 128)).float()
    rows = scale.float().reshape(-1).expand(tensors["weight"].shape[0])
    return torch.from_numpy(true_weights(tensors["weight"], rows, 0)).float()


def part(name: str, tensors: dict[str, torch.Tensor], rows: range | None = None) -> LinearPart:
    return LinearPart(name, rows or range(tensors["weight"].shape[0]), {n: MemoryTensor(f"{name}.{n}", t) for n, t in tensors.items()})


def run(uses: tuple[FormatUse, ...], x: torch.Tensor) -> torch.Tensor:
    outs = []
    for use in uses:
        loaded = use.load() if use.convert is None else use.convert(use.load())
        assert use.nbytes == sum(tensor.nbytes for tensor in loaded.values())
        outs.append({"gemm": GemmReference, "gemm_fp8": GemmFp8Reference}[use.op](use.facts).run(loaded, x))
    return torch.cat(outs, -1)


@pytest.mark.parametrize("config", [BLOCKS, TENSOR, CHANNEL], ids=["blocks", "tensor", "channel"])
def test_parts_are_stacked_whatever_their_scales(config: dict[str, Any]) -> None:
    gen = torch.Generator().manual_seed(0)
    weights = {name: stored(config, torch.randn(rows, 200, generator=gen)) for name, rows in (("q", 256), ("k", 128), ("v", 72))}
    parts = tuple(part(name, tensors) for name, tensors in weights.items())
    form = format_for({"quantization_config": config}, parts[0].tensors)
    uses = form.linear(LinearUse("layers.0.mixer.q_k_v", "float32", range(200), parts))
    assert [use.op for use in uses] == ["gemm_fp8"]
    assert uses[0].facts.scale_shape == ((4, 2) if config is BLOCKS else (456,))
    x = torch.randn(3, 200, generator=gen)
    torch.testing.assert_close(run(uses, x), F.linear(x, torch.cat([plain(tensors) for tensors in weights.values()])))


def test_blocks_that_end_inside_a_part_are_not_stacked_with_the_next() -> None:
    gen = torch.Generator().manual_seed(1)
    weights = {name: stored(BLOCKS, torch.randn(rows, 128, generator=gen)) for name, rows in (("a", 200), ("b", 128), ("c", 128))}
    parts = tuple(part(name, tensors) for name, tensors in weights.items())
    uses = format_for({"quantization_config": BLOCKS}, parts[0].tensors).linear(LinearUse("layers.0.x", "float32", range(128), parts))
    assert [use.parts for use in uses] == [("a",), ("b", "c")]
    x = torch.randn(3, 128, generator=gen)
    torch.testing.assert_close(run(uses, x), F.linear(x, torch.cat([plain(tensors) for tensors in weights.values()])))


@pytest.mark.parametrize("config", [BLOCKS, TENSOR, CHANNEL], ids=["blocks", "tensor", "channel"])
@pytest.mark.parametrize(
    ("rows", "columns"), [(range(128, 256), range(128)), (range(60, 200), range(128, 256)), (range(256), range(64, 192))]
)
def test_a_ranks_share_is_cut_out_of_weights_and_scales(config: dict[str, Any], rows: range, columns: range) -> None:
    gen = torch.Generator().manual_seed(2)
    tensors = stored(config, torch.randn(256, 256, generator=gen))
    one = part("o", tensors, rows)
    uses = format_for({"quantization_config": config}, one.tensors).linear(LinearUse("layers.0.mixer.o", "float32", columns, (one,)))
    whole = config is not BLOCKS or not any(n % 128 for n in (rows.start, rows.stop, columns.start, columns.stop))
    assert [use.op for use in uses] == ["gemm_fp8" if whole else "gemm"]
    x = torch.randn(3, len(columns), generator=gen)
    expected = F.linear(x, plain(tensors)[rows.start : rows.stop, columns.start : columns.stop])
    torch.testing.assert_close(run(uses, x), expected)


def test_plain_layers_of_a_checkpoint_stay_plain() -> None:
    mixed = (part("q", stored(CHANNEL, torch.randn(32, 64))), part("k", {"weight": torch.randn(32, 64)}))
    form = format_for({"quantization_config": CHANNEL}, mixed[0].tensors)
    uses = form.linear(LinearUse("layers.0.mixer.q_k", "float32", range(64), mixed))
    assert [use.op for use in uses] == ["gemm_fp8", "gemm"]


def four_experts() -> tuple[dict[str, torch.Tensor], dict[str, dict[str, MemoryTensor]]]:
    """Numbers, and the codes and scales that stand for them."""
    gen = torch.Generator().manual_seed(3)
    shapes = {"gate": (192, 128), "up": (192, 128), "down": (128, 192)}
    weights = {name: torch.randn(4, *shape, generator=gen) for name, shape in shapes.items()}
    tensors = {}
    for name, weight in weights.items():
        codes, scale = quantised(weight, 128)
        tensors[name] = {"weight": MemoryTensor(name, codes), "weight_scale_inv": MemoryTensor(name, scale)}
        weights[name] = torch.stack([torch.from_numpy(true_weights(codes[i], scale[i], 128)) for i in range(4)]).float()
    return weights, tensors


def test_experts_stay_in_their_codes() -> None:
    weights, tensors = four_experts()
    for hidden in (range(192), range(128), range(128, 192)):
        facts = MoeMlpFacts("float32", 4, 128, len(hidden), 2, first=1, local=2)
        use = Fp8Format(128, converts=False).experts(ExpertsUse("layers.0.ff.experts", facts, range(1, 3), hidden, tensors))
        assert use.op == "moe_mlp_fp8" and use.facts == MoeMlpFp8Facts(facts, 128)
        loaded, mine = use.load(), slice(hidden.start, hidden.stop)
        assert use.nbytes == sum(tensor.nbytes for tensor in loaded.values())
        for expert in range(2):
            wide = torch.cat([weights["gate"][1 + expert, mine], weights["up"][1 + expert, mine]])
            torch.testing.assert_close(expert_numbers(use.facts, loaded, "up", expert), wide)
            torch.testing.assert_close(expert_numbers(use.facts, loaded, "down", expert), weights["down"][1 + expert, :, mine])


def test_experts_cut_within_squares_are_decoded() -> None:
    weights, tensors = four_experts()
    facts = MoeMlpFacts("float32", 4, 128, 96, 2, first=1, local=2)
    use = Fp8Format(128, converts=False).experts(ExpertsUse("layers.0.ff.experts", facts, range(1, 3), range(96, 192), tensors))
    loaded = use.load()
    assert use.op == "moe_mlp"
    torch.testing.assert_close(loaded["up"], torch.cat([weights["gate"][1:3, 96:], weights["up"][1:3, 96:]], 1))
    torch.testing.assert_close(loaded["down"], weights["down"][1:3, :, 96:])


@pytest.mark.parametrize("block", [0, 128])
def test_conversion_loses_half_a_step_at_most(block: int) -> None:
    weight = torch.randn(200, 300, generator=torch.Generator().manual_seed(4))
    codes, scale = quantised(weight, block)
    error = (dequantised(codes, scale, block) - weight).abs()
    spread = scale[:, None] if not block else scale.repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)[:, :300]
    assert (error <= torch.maximum(weight.abs() / 16, spread * 2**-10) * 1.001).all()


def test_conversion_leaves_router_head_and_narrow_layers_alone() -> None:
    form = format_for({}, {}, "fp8")

    def op(path: str, rows: int = 64) -> str:
        return form.linear(LinearUse(path, "float32", range(64), (LinearPart("x", range(rows)),)))[0].op

    assert op("layers.0.ff.down") == "gemm_fp8"
    assert {op("layers.0.ff.router"), op("head"), op("layers.0.mixer.o", 24)} == {"gemm"}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"weight": torch.zeros(8, 8).to(E4M3)}, "beside a weight_scale"),
        ({"weight": torch.zeros(8, 8).to(torch.float8_e5m2), "weight_scale": torch.ones(())}, "float8_e5m2"),
        ({"weight": torch.zeros(8, 8).to(E4M3), "weight_scale": torch.ones(3)}, r"shape \[3\]"),
    ],
)
def test_what_does_not_fit_is_named(tensors: dict[str, torch.Tensor], message: str) -> None:
    one = part("o", tensors)
    with pytest.raises(CheckpointError, match=message):
        format_for({"quantization_config": CHANNEL}, one.tensors).linear(LinearUse("layers.0.o", "float32", range(8), (one,)))


def test_other_schemes_are_not_claimed() -> None:
    groups = {"group_0": {"weights": {"num_bits": 4, "type": "int", "strategy": "group"}}}
    with pytest.raises(ModelError, match="no number format"):
        format_for({"quantization_config": {"quant_method": "compressed-tensors", "config_groups": groups}}, {})


def tiny(stem: str) -> transformers.PreTrainedModel:
    sizes = {"vocab_size": 96, "hidden_size": 192, "intermediate_size": 320, "num_attention_heads": 4, "num_key_value_heads": 2}
    if stem == "Phi3":  # whose stacked projections end where squares do
        sizes |= {"hidden_size": 256, "intermediate_size": 384}
    more = {"pad_token_id": 0} if stem == "Phi3" else {}
    if stem == "Qwen3Moe":
        more = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 160, "decoder_sparse_step": 1, "head_dim": 48}
    config = getattr(transformers, f"{stem}Config")(**sizes, num_hidden_layers=2, max_position_embeddings=128, sliding_window=None, **more)
    torch.manual_seed(7)
    model = getattr(transformers, f"{stem}ForCausalLM")._from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape) * (0.1 if weight.dim() == 1 else 0.05))
    return model


def apart(state: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Experts one by one, as checkpoints have them: views of the model's stacks."""
    for name, tensor in state.items():
        stem, _, last = name.rpartition(".")
        if not stem.endswith("experts"):
            yield name, tensor
            continue
        parts = ("gate_proj", "up_proj") if last == "gate_up_proj" else (last,)
        for expert, matrix in enumerate(tensor):
            for part, piece in zip(parts, matrix.chunk(len(parts)), strict=True):
                yield f"{stem}.{expert}.{part}.weight", piece


def save(model: transformers.PreTrainedModel, folder: Path, config: dict[str, Any] | None) -> Path:
    """The checkpoint in this format; the model gets the numbers that its codes stand for."""
    tensors, state = {}, dict(model.state_dict())
    for name, tensor in apart(state):
        stem = name.removesuffix(".weight")
        if config is None or "_proj" not in stem or tensor.dim() != 2:
            tensors[name] = tensor.clone()
            continue
        made = stored(config, tensor)
        tensor.copy_(plain(made))
        tensors |= {f"{stem}.{key}": value.clone() for key, value in made.items()}
    content = model.config.to_dict() | ({"quantization_config": config} if config else {})
    content["architectures"] = [type(model).__name__]
    (folder / "config.json").write_text(json.dumps(content))
    save_file(tensors, folder / "model.safetensors")
    return folder


def logits(path: Path, device_name: str = "cpu", quantization: str | None = None, load_format: str = "auto") -> torch.Tensor:
    backend = find(device_name)
    device = backend.open(0)
    table = kernel_table(backend, device.info)
    description = describe(open_checkpoint(path, load_format), dtype="float32", table=table, quantization=quantization)
    model = load_model(description, device, table)
    assert {op for op, _ in description.uses} >= {"gemm_fp8", "gemm"}
    assert not any(op == "moe_mlp" for op, _ in description.uses)
    assert model.loaded.nbytes == pytest.approx(description.facts.weight_bytes, rel=0.02)
    run = DirectRun(model, device, 1, 64)
    before = run.logits(run.step([(0, PROMPT)]).hidden)
    model.refill()
    run.lengths[0] = 0
    assert torch.equal(run.logits(run.step([(0, PROMPT)]).hidden), before)
    return before


@pytest.mark.parametrize("device", ["cpu", "reference"])
@pytest.mark.parametrize("config", [BLOCKS, TENSOR, CHANNEL], ids=["blocks", "tensor", "channel"])
@pytest.mark.parametrize("stem", ["Llama", "Phi3", "Qwen3Moe"])
def test_a_checkpoint_gives_the_logits_of_what_its_codes_stand_for(stem: str, config: dict[str, Any], device: str, tmp_path: Path) -> None:
    model = tiny(stem)
    path = save(model, tmp_path, config)
    with torch.no_grad():
        expected = model(torch.tensor([PROMPT])).logits[0]
    got = logits(path, device)
    assert (got - expected).abs().max() < 1e-4 * expected.std()


def test_a_plain_checkpoint_is_converted(tmp_path: Path) -> None:
    model = tiny("Llama")
    path = save(model, tmp_path, None)
    got = logits(path, quantization="fp8")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "_proj" in name and weight.dim() == 2:
                weight.copy_(dequantised(*quantised(weight), 0))
        expected = model(torch.tensor([PROMPT])).logits[0]
    assert (got - expected).abs().max() < 1e-4 * expected.std()


def test_drawn_weights_of_a_float8_configuration_are_float8(tmp_path: Path) -> None:
    path = save(tiny("Llama"), tmp_path, BLOCKS)
    assert logits(path, load_format="dummy").isfinite().all()
