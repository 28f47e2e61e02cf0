"""Safetensors files as a weight source: slices are right, and every kind of damage is named."""

import json
import random

import pytest
import safetensors.torch
import torch
from pagoda.hal.errors import CheckpointError
from pagoda.models.loading.safetensors_source import SafetensorsSource, safetensors_files
from pagoda.models.loading.stored import DTYPES

TENSORS = {
    "a.weight": torch.arange(24, dtype=torch.float32).view(6, 4),
    "b.weight": torch.arange(24).view(2, 3, 4).to(torch.bfloat16),
    "c.bias": torch.arange(5, dtype=torch.int8),
    "scalar": torch.tensor(3.5, dtype=torch.float64),
    "empty": torch.empty(0, 3),
}


def write(folder, tensors=TENSORS, name="model.safetensors"):
    path = folder / name
    safetensors.torch.save_file(tensors, path)
    return path


def open_folder(folder):
    return SafetensorsSource(*safetensors_files(folder))


def rewrite_header(path, change):
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def test_tensors_and_slices(tmp_path):
    write(tmp_path)
    source = open_folder(tmp_path)
    for name, tensor in TENSORS.items():
        stored = source.tensors[name]
        assert (stored.shape, DTYPES[stored.dtype]) == (tuple(tensor.shape), tensor.dtype)
        assert torch.equal(stored.read(), tensor)
    assert torch.equal(source.tensors["a.weight"].read((slice(2, 5), slice(1, 3))), TENSORS["a.weight"][2:5, 1:3])
    assert torch.equal(source.tensors["b.weight"].read((slice(1, 2), slice(None), slice(2, 4))), TENSORS["b.weight"][1:2, :, 2:4])
    assert torch.equal(source.tensors["c.bias"].read((slice(3, None),)), TENSORS["c.bias"][3:])


@pytest.mark.parametrize("dtype", [d for d in DTYPES.values() if d not in (torch.complex64,)], ids=str)
def test_every_dtype_comes_back(tmp_path, dtype):
    tensor = torch.randint(0, 2, (3, 8), generator=torch.Generator().manual_seed(0)).to(dtype)
    write(tmp_path, {"x": tensor, "odd": torch.zeros(3, dtype=torch.uint8)})
    assert torch.equal(open_folder(tmp_path).tensors["x"].read().view(torch.uint8), tensor.view(torch.uint8))


def test_a_header_of_odd_length_still_gives_typed_tensors(tmp_path):
    path = write(tmp_path)
    rewrite_header(path, lambda header: header.update({"__metadata__": {"pad": "x"}}))
    assert torch.equal(open_folder(tmp_path).tensors["a.weight"].read(), TENSORS["a.weight"])


def test_writing_into_a_tensor_leaves_the_file_alone(tmp_path):
    path = write(tmp_path)
    before = path.read_bytes()
    open_folder(tmp_path).tensors["a.weight"].read().zero_()
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda data: data[:-1], "truncated"),
        (lambda data: data + b"x", "stray"),
        (lambda data: data[:4], "truncated or no safetensors"),
        (lambda data: (1 << 40).to_bytes(8, "little") + data[8:], "1099511627776 bytes is announced"),
        (lambda data: data[:8] + b"!" + data[9:], "not JSON"),
        (lambda data: b"", "header of 0 bytes"),
    ],
)
def test_damaged_files_are_refused(tmp_path, damage, words):
    path = write(tmp_path)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(CheckpointError, match=words) as caught:
        open_folder(tmp_path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda h: h["a.weight"].update(dtype="F16"), "takes 48 bytes, its entry spans 96"),
        (lambda h: h["a.weight"].update(dtype="Q9"), "stored as Q9"),
        (lambda h: h["a.weight"].pop("shape"), "expected dtype, shape"),
        (lambda h: h["a.weight"].update(data_offsets=[0, 96]), "overlaps|hole"),
        (lambda h: h.pop("a.weight"), "hole|truncated|stray"),
    ],
)
def test_lying_headers_are_refused(tmp_path, change, words):
    path = write(tmp_path)
    rewrite_header(path, change)
    with pytest.raises(CheckpointError, match=words):
        open_folder(tmp_path)


def shard(folder, weight_map=None):
    names = list(TENSORS)
    write(folder, {n: TENSORS[n] for n in names[:2]}, "model-00001-of-00002.safetensors")
    write(folder, {n: TENSORS[n] for n in names[2:]}, "model-00002-of-00002.safetensors")
    where = {n: f"model-0000{1 if i < 2 else 2}-of-00002.safetensors" for i, n in enumerate(names)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map(where) if weight_map else where}))


def test_shards_with_an_index(tmp_path):
    shard(tmp_path)
    source = open_folder(tmp_path)
    assert set(source.tensors) == set(TENSORS)
    assert torch.equal(source.tensors["c.bias"].read(), TENSORS["c.bias"])


def test_a_missing_shard_is_named(tmp_path):
    shard(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match="model-00002-of-00002"):
        open_folder(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match="2 shards are announced, 1 are here; missing: 2"):
        open_folder(tmp_path)


def test_an_index_that_disagrees_names_everything(tmp_path):
    shard(tmp_path, lambda where: {**{n: f for n, f in where.items() if n != "c.bias"}, "ghost": "model-00001-of-00002.safetensors"})
    with pytest.raises(CheckpointError, match=r"ghost in model-00001.*c\.bias of model-00002"):
        open_folder(tmp_path)


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    write(tmp_path, {"x": torch.zeros(1)}, "one.safetensors")
    write(tmp_path, {"x": torch.zeros(1)}, "two.safetensors")
    with pytest.raises(CheckpointError, match=r"x \(one.safetensors, two.safetensors\)"):
        open_folder(tmp_path)


def test_an_index_may_not_point_elsewhere(tmp_path):
    shard(tmp_path, lambda where: dict.fromkeys(where, "../secret.safetensors"))
    with pytest.raises(CheckpointError, match="outside its folder"):
        open_folder(tmp_path)


@pytest.mark.parametrize("seed", range(60))
def test_random_damage_of_the_header_gives_our_error_or_readable_tensors(tmp_path, seed):
    path = write(tmp_path)
    data = bytearray(path.read_bytes())
    draw = random.Random(seed)
    for _ in range(2):
        data[draw.randrange(8 + int.from_bytes(data[:2], "little"))] = draw.choice(b'0123456789"[]{}:,-.ex\x00\xff')
    path.write_bytes(data)
    try:
        tensors = open_folder(tmp_path).tensors
    except CheckpointError:
        return
    for tensor in tensors.values():
        assert tuple(tensor.read().shape) == tensor.shape


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [6, 4], "data_offsets": ["8", "104"]},
        {"dtype": "F32", "shape": [-6, -4], "data_offsets": [8, 104]},
        {"dtype": "F32", "shape": [6.5, 4], "data_offsets": [8, 104]},
        {"dtype": "F32", "shape": "64", "data_offsets": [8, 104]},
        {"dtype": ["F32"], "shape": [6, 4], "data_offsets": [8, 104]},
        {"dtype": "F32", "shape": [6, 4], "data_offsets": [0]},
        ["F32", [6, 4], [8, 104]],
        None,
    ],
)
def test_entries_of_the_wrong_kind_are_refused(tmp_path, entry):
    path = write(tmp_path)
    rewrite_header(path, lambda header: header.update({"a.weight": entry}))
    with pytest.raises(CheckpointError, match=r"a\.weight"):
        open_folder(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', "{"])
def test_an_index_that_is_none_is_refused(tmp_path, text):
    shard(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json is n"):
        open_folder(tmp_path)
