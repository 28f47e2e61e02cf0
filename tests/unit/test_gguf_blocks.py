"""The decoders of ggml's block formats against the gguf package, bit for bit, on random bytes."""

import gguf
import numpy as np
import pytest
import torch
from pagoda.ops.gguf.decode import DECODERS, PLAIN_DTYPES, decode, decode_into
from pagoda.ops.gguf.types import BLOCKS, GgmlType

WITHOUT_ORACLE = {GgmlType.Q8_K, GgmlType.Q1_0}


def random_rows(kind: GgmlType, rows: int, blocks: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (rows, blocks * kind.bytes), dtype=np.uint8)


def same_bits(got: torch.Tensor, expected: np.ndarray) -> bool:
    a, b = got.numpy(), expected
    nan = np.isnan(a) & np.isnan(b)
    return a.shape == b.shape and bool(np.all(nan | (a == b)))


def test_sizes_and_codes_are_those_of_the_gguf_package():
    theirs = {t.name: (int(t), *gguf.GGML_QUANT_SIZES[t]) for t in gguf.GGMLQuantizationType}
    ours = {t.name: (int(t), t.block, t.bytes) for t in GgmlType}
    assert {name: ours[name] for name in ours if name in theirs} == {name: theirs[name] for name in theirs if name in ours}
    assert set(theirs) <= set(ours)


@pytest.mark.parametrize("kind", sorted(set(DECODERS) - WITHOUT_ORACLE), ids=lambda k: k.name)
@pytest.mark.parametrize("shape", [(1, 1), (3, 2), (17, 5)])
def test_random_bytes_decode_as_in_the_gguf_package(kind, shape):
    data = random_rows(kind, *shape)
    with np.errstate(all="ignore"):
        expected = gguf.dequantize(data, gguf.GGMLQuantizationType(int(kind)))
    assert same_bits(decode(torch.from_numpy(data), kind), expected)


@pytest.mark.parametrize(
    "kind", [GgmlType.Q4_0, GgmlType.Q4_1, GgmlType.Q5_0, GgmlType.Q5_1, GgmlType.Q8_0, GgmlType.TQ1_0, GgmlType.TQ2_0, GgmlType.MXFP4]
)
def test_quantised_numbers_come_back_close(kind):
    values = np.random.default_rng(1).standard_normal((4, 512)).astype(np.float32)
    data = gguf.quantize(values, gguf.GGMLQuantizationType(int(kind)))
    back = decode(torch.from_numpy(data), kind).numpy()
    assert same_bits(torch.from_numpy(back), gguf.dequantize(data, gguf.GGMLQuantizationType(int(kind))))
    ternary = kind in (GgmlType.TQ1_0, GgmlType.TQ2_0)
    assert np.abs(back - values).max() < (4.0 if ternary else 1.0)


def test_q8_k_is_scale_times_bytes():
    q = np.arange(256, dtype=np.int64).astype(np.uint8).view(np.int8)
    block = np.concatenate([np.array([0.25], np.float32).view(np.uint8), q.view(np.uint8), np.zeros(32, np.uint8)])
    assert np.array_equal(decode(torch.from_numpy(block), GgmlType.Q8_K).numpy(), 0.25 * q.astype(np.float32))


def test_q1_0_is_plus_or_minus_the_scale():
    bits = np.random.default_rng(2).integers(0, 2, 128)
    block = np.concatenate([np.array([1.5], np.float16).view(np.uint8), np.packbits(bits, bitorder="little")])
    assert np.array_equal(decode(torch.from_numpy(block), GgmlType.Q1_0).numpy(), np.where(bits, 1.5, -1.5).astype(np.float32))


@pytest.mark.parametrize("kind", sorted(PLAIN_DTYPES), ids=lambda k: k.name)
def test_plain_formats_are_views(kind):
    values = torch.arange(-4, 4).to(PLAIN_DTYPES[kind]).view(2, 4)
    assert torch.equal(decode(values.view(torch.uint8), kind), values)
    assert BLOCKS[kind] == (1, values.element_size())


def test_decode_into_equals_decode_whatever_the_step():
    data = torch.from_numpy(random_rows(GgmlType.Q4_1, 7, 3) & 0x3B)
    whole = decode(data, GgmlType.Q4_1)
    assert torch.equal(decode_into(torch.empty(7, 96), data, GgmlType.Q4_1, elements_at_once=200), whole)
    assert torch.equal(decode_into(torch.empty(7, 96, dtype=torch.bfloat16), data, GgmlType.Q4_1), whole.bfloat16())


def test_a_row_that_is_not_whole_blocks_is_refused():
    with pytest.raises(ValueError, match=r"100 elements.*Q4_K.*256"):
        GgmlType.Q4_K.row_bytes(100)
