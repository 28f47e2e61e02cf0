"""The gguf number format: what it asks of the kernel table, and that its primitives compute what the blocks say."""

import gguf
import numpy as np
import pytest
import torch
from pagoda.hal.errors import CheckpointError
from pagoda.models.loading.gguf_file import GgufFile
from pagoda.ops.gguf.decode import decode
from pagoda.ops.gguf.types import GgmlType
from pagoda.ops.linear import EmbeddingFacts, GemmFacts, GemmReference
from pagoda.ops.linear_gguf import EmbeddingGgufReference, GemmGgufDequantised, GemmGgufReference
from pagoda.ops.moe import MoeMlpFacts
from pagoda.quant.format import EmbeddingUse, ExpertsUse, LinearPart, LinearUse
from pagoda.quant.gguf import GgufFormat

rng = np.random.default_rng(0)
NUMBERS = {
    "q": rng.standard_normal((8, 64)).astype(np.float32),
    "k": rng.standard_normal((4, 64)).astype(np.float32),
    "v": rng.standard_normal((4, 64)).astype(np.float32),
    "q_bias": rng.standard_normal(8).astype(np.float32),
    "k_bias": rng.standard_normal(4).astype(np.float32),
    "v_bias": rng.standard_normal(4).astype(np.float32),
    "table": rng.standard_normal((10, 64)).astype(np.float32),
    "gate": rng.standard_normal((3, 64, 32)).astype(np.float32),
    "up": rng.standard_normal((3, 64, 32)).astype(np.float32),
    "down": rng.standard_normal((3, 32, 64)).astype(np.float32),
}
KINDS = {"q": "Q4_1", "k": "Q4_1", "v": "Q8_0", "table": "Q8_0", "gate": "Q4_0", "up": "Q8_0", "down": "Q5_1"}


@pytest.fixture(scope="module")
def tensors(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "t.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for name, values in NUMBERS.items():
        code = gguf.GGMLQuantizationType[KINDS.get(name, "F32")]
        writer.add_tensor(name, gguf.quantize(values, code), raw_dtype=code)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GgufFile(path).tensors


def rounded(name):
    code = gguf.GGMLQuantizationType[KINDS.get(name, "F32")]
    return torch.from_numpy(gguf.dequantize(gguf.quantize(NUMBERS[name], code), code))


def part(tensors, name, rows=None):
    size = NUMBERS[name].shape[0]
    return LinearPart(name, rows or range(size), {"weight": tensors[name], "bias": tensors[f"{name}_bias"]})


def run(use, x):
    kernels = {"gemm_gguf": GemmGgufReference, "gemm": GemmReference}
    kernel = kernels[use.op](use.facts)
    return kernel.run(kernel.pack(use.load()), x)


def test_it_claims_checkpoints_with_blocks_only(tensors):
    assert GgufFormat().claims({}, tensors)
    assert not GgufFormat().claims({}, {"q_bias": tensors["q_bias"]})


def test_neighbours_in_one_format_share_a_use(tensors):
    use = LinearUse("qkv", "float32", range(64), tuple(part(tensors, n) for n in "qkv"), bias=True)
    first, second = GgufFormat().linear(use)
    assert (first.op, first.facts.kind, first.parts, first.facts.out_features) == ("gemm_gguf", "Q4_1", ("q", "k"), 12)
    assert (second.op, second.facts.kind, second.parts) == ("gemm_gguf", "Q8_0", ("v",))
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    got = torch.cat([run(u, x) for u in (first, second)], -1)
    weight = torch.cat([rounded(n) for n in "qkv"])
    bias = torch.cat([rounded(f"{n}_bias") for n in "qkv"])
    torch.testing.assert_close(got, x @ weight.T + bias)
    assert [u.nbytes for u in (first, second)] == [sum(t.nbytes for t in u.load().values()) for u in (first, second)]


def test_a_rank_gets_its_rows_and_columns(tensors):
    use = LinearUse("q", "float32", range(32, 64), (part(tensors, "q", range(4, 8)),))
    (only,) = GgufFormat().linear(use)
    x = torch.ones(1, 32)
    torch.testing.assert_close(run(only, x), x @ rounded("q")[4:8, 32:].T)


def test_columns_that_cut_through_blocks_are_decoded(tensors):
    use = LinearUse("q", "float32", range(16, 48), (part(tensors, "q"),))
    (only,) = GgufFormat().linear(use)
    assert only.op == "gemm" and only.facts == GemmFacts("float32", 32, 8)
    x = torch.ones(1, 32)
    torch.testing.assert_close(run(only, x), x @ rounded("q")[:, 16:48].T)


def test_a_tensor_that_is_too_small_is_named(tensors):
    with pytest.raises(CheckpointError, match=r"q has shape \[8, 64\], at least \[8, 128\]"):
        GgufFormat().linear(LinearUse("q", "float32", range(128), (part(tensors, "q"),)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_decoded_once_equals_decoded_each_time(tensors, dtype):
    use = LinearUse("q", dtype, range(64), (part(tensors, "q"),), bias=True)
    (only,) = GgufFormat().linear(use)
    once, each = GemmGgufDequantised(only.facts), GemmGgufReference(only.facts)
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1)).to(getattr(torch, dtype))
    packed = once.pack(only.load())
    assert torch.equal(once.run(packed, x), each.run(each.pack(only.load()), x))
    address = packed["weight"].data_ptr()
    again = once.pack({name: torch.zeros_like(t) for name, t in only.load().items()}, out=packed)
    assert again["weight"].data_ptr() == address and not once.run(again, x).any()


@pytest.mark.parametrize("first", [0, 4])
def test_embedding_rows(tensors, first):
    facts = EmbeddingFacts("float32", 8, 64, first=first, partial=True)
    use = GgufFormat().embedding(EmbeddingUse("embed", facts, range(first, min(first + 8, 10)), {"weight": tensors["table"]}))
    assert (use.op, use.facts.kind) == ("embedding_gguf", "Q8_0")
    kernel = EmbeddingGgufReference(use.facts)
    ids = torch.arange(12, dtype=torch.int32)
    expected = torch.zeros(12, 64)
    expected[first : min(first + 8, 10)] = rounded("table")[first : first + 8]
    assert torch.equal(kernel.run(kernel.pack(use.load()), ids), expected)


def experts(tensors, hidden):
    facts = MoeMlpFacts("float32", 3, 32, len(hidden), 2)
    parts = {name: {"weight": tensors[name]} for name in ("gate", "up", "down")}
    return GgufFormat().experts(ExpertsUse("moe", facts, range(1, 3), hidden, parts))


def test_experts_of_two_formats_are_decoded(tensors):
    use = experts(tensors, range(32, 64))
    loaded = use.load()
    assert use.op == "moe_mlp"
    assert torch.equal(loaded["up"], torch.cat([rounded("gate")[1:, 32:], rounded("up")[1:, 32:]], 1))
    assert torch.equal(loaded["down"], rounded("down")[1:, :, 32:])
    assert use.nbytes == sum(t.nbytes for t in loaded.values())


def test_experts_stay_in_their_blocks(tensors):
    tensors = {**tensors, "gate": tensors["up"]}
    use = experts(tensors, range(32, 64))
    loaded = use.load()
    assert (use.op, use.facts.up_kind, use.facts.down_kind) == ("moe_mlp_gguf", "Q8_0", "Q5_1")
    assert use.nbytes == sum(t.nbytes for t in loaded.values())
    whole = rounded("up")[1:, 32:]
    assert torch.equal(decode(loaded["up"], GgmlType.Q8_0), torch.cat([whole, whole], 1))
    assert torch.equal(decode(loaded["down"], GgmlType.Q5_1), rounded("down")[1:, :, 32:])
    cut = experts(tensors, range(16, 48))
    assert cut.op == "moe_mlp" and torch.equal(cut.load()["down"], rounded("down")[1:, :, 16:48])
