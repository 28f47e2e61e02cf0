"""GGUF files: metadata and tensors as the gguf package wrote them, and every kind of damage is named."""

import gguf
import numpy as np
import pytest
import torch
from pagoda.hal.errors import CheckpointError
from pagoda.models.loading.gguf_file import GgufFile

VALUES = np.random.default_rng(0).standard_normal((6, 64)).astype(np.float32)


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 3)
    writer.add_float32("llama.rope.freq_base", 10000.0)
    writer.add_bool("tokenizer.ggml.add_bos_token", True)
    writer.add_array("tokenizer.ggml.tokens", ["a", "é", "▁the", ""])
    writer.add_array("tokenizer.ggml.scores", [0.5, -1.0])
    writer.add_tensor("plain", VALUES)
    writer.add_tensor("half", VALUES.astype(np.float16))
    for kind in ("Q8_0", "Q4_1"):
        code = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(kind, gguf.quantize(VALUES, code), raw_dtype=code)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_metadata(path):
    metadata = GgufFile(path).metadata
    assert metadata["general.architecture"] == "llama"
    assert metadata["llama.block_count"] == 3
    assert metadata["llama.rope.freq_base"] == 10000.0
    assert metadata["tokenizer.ggml.add_bos_token"] is True
    assert metadata["tokenizer.ggml.tokens"] == ["a", "é", "▁the", ""]
    assert metadata["tokenizer.ggml.scores"] == [0.5, -1.0]


def test_tensors_and_their_slices(path):
    tensors = GgufFile(path).tensors
    assert {name: (t.shape, t.dtype) for name, t in tensors.items()} == {
        "plain": ((6, 64), "float32"),
        "half": ((6, 64), "float16"),
        "Q8_0": ((6, 64), "Q8_0"),
        "Q4_1": ((6, 64), "Q4_1"),
    }
    assert np.array_equal(tensors["plain"].read((slice(2, 4), slice(0, 3))).numpy(), VALUES[2:4, :3])
    assert np.array_equal(tensors["half"].read().numpy(), VALUES.astype(np.float16))
    blocks = gguf.quantize(VALUES, gguf.GGMLQuantizationType.Q4_1)
    assert np.array_equal(tensors["Q4_1"].read().numpy(), blocks)
    assert np.array_equal(tensors["Q4_1"].read((slice(1, 5), slice(32, 64))).numpy(), blocks[1:5, 20:40])


def test_a_slice_off_block_boundaries_is_refused(path):
    with pytest.raises(CheckpointError, match="blocks of 32"):
        GgufFile(path).tensors["Q8_0"].read((slice(None), slice(0, 40)))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda data: b"", "is empty"),
        (lambda data: b"GGML" + data[4:], "begins with b'GGML'"),
        (lambda data: data[:4] + b"\x00\x00\x00\x03" + data[8:], "big-endian"),
        (lambda data: data[:4] + b"\x09\x00\x00\x00" + data[8:], "version 9"),
        (lambda data: data[:100], "the file ends at 100"),
        (lambda data: data[:-64], "truncated"),
        (lambda data: data[:8] + b"\xff" * 4 + data[12:], "truncated or corrupt|dimensions"),
        (lambda data: data.replace(b"plain", b"Q8_0\x00", 1), "Q8_0|named"),
        (lambda data: data.replace(b"half", b"\xff\xff\xff\xff", 1), None),
    ],
)
def test_damaged_files_are_refused(path, damage, words):
    path.write_bytes(damage(path.read_bytes()))
    if words is None:
        assert "half" not in GgufFile(path).tensors
        return
    try:
        file = GgufFile(path)
    except CheckpointError as error:
        assert str(path) in str(error)
        assert any(word in str(error) for word in words.split("|")), str(error)
    else:
        assert "Q8_0\x00" in file.tensors


@pytest.mark.parametrize("seed", range(30))
def test_random_damage_of_the_header_gives_our_error_or_a_file(path, seed):
    data = bytearray(path.read_bytes())
    rng = np.random.default_rng(seed)
    for position in rng.integers(0, 400, 3):
        data[position] = rng.integers(0, 256)
    path.write_bytes(data)
    try:
        tensors = GgufFile(path).tensors
    except CheckpointError:
        return
    for tensor in tensors.values():
        assert isinstance(tensor.read(), torch.Tensor)
