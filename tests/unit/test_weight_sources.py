"""Dummy weights, weights in memory, and watching a load."""

import pytest
import torch
from pagoda.hal.errors import CheckpointError
from pagoda.models.loading.dummy_source import DummySource
from pagoda.models.loading.memory_source import MemorySource
from pagoda.models.loading.progress import watched
from pagoda.models.loading.torch_source import torch_files, torch_source

SHAPES = [
    ("layers.0.q.weight", (300, 4096), "float32"),
    ("layers.0.norm.weight", (64,), "bfloat16"),
    ("layers.0.mixer_in.weight", (64,), "bfloat16"),
    ("layers.0.q.bias", (64,), "float32"),
    ("experts.up", (4, 32, 64), "bfloat16"),
]


def test_dummy_slices_agree_with_the_whole():
    source = DummySource(SHAPES, seed=3)
    whole = source.tensors["layers.0.q.weight"].read()
    assert torch.equal(source.tensors["layers.0.q.weight"].read((slice(100, 200), slice(8, 80))), whole[100:200, 8:80])
    experts = source.tensors["experts.up"]
    assert torch.equal(experts.read((slice(1, 3), slice(4, 8))), experts.read()[1:3, 4:8])


def test_dummy_numbers_have_the_right_scale_and_no_equal_rows():
    tensors = DummySource(SHAPES, seed=3).tensors
    weight = tensors["layers.0.q.weight"].read()
    assert weight.std() * 64 == pytest.approx(1, abs=0.01) and weight.mean().abs() < 1e-4
    assert len(torch.unique(weight, dim=0)) == 300
    assert torch.linalg.matrix_rank(weight[:, :512].double()) == 300
    for name in ("layers.0.norm.weight", "layers.0.mixer_in.weight"):
        assert torch.equal(tensors[name].read(), torch.ones(64, dtype=torch.bfloat16))
    assert tensors["layers.0.q.bias"].read().abs().max() < 0.05


def test_dummy_numbers_follow_seed_and_name():
    first, same, other = (DummySource(SHAPES, seed=seed).tensors["experts.up"].read() for seed in (1, 1, 2))
    assert torch.equal(first, same) and not torch.equal(first, other)
    renamed = DummySource([("other.up", (4, 32, 64), "bfloat16")], seed=1).tensors["other.up"].read()
    assert not torch.equal(first, renamed)


def test_a_stream_is_drained_once_per_name():
    numbers = torch.arange(6.0).view(2, 3)
    source = MemorySource.drain(iter([("a", numbers), ("b", numbers)]))
    assert torch.equal(source.tensors["a"].read((slice(1, 2),)), numbers[1:2])
    assert source.tensors["a"].read().data_ptr() == numbers.data_ptr()
    with pytest.raises(CheckpointError, match="sends a twice"):
        MemorySource.drain([("a", numbers), ("a", numbers)])


def test_watching_counts_bytes_read():
    seen = []
    tensors = watched(MemorySource({"a": torch.zeros(4), "b": torch.zeros(2, 2)}).tensors, lambda *args: seen.append(args))
    assert tensors["a"].read((slice(0, 2),)).shape == (2,)
    tensors["b"].read()
    assert seen == [("a", 8, 32), ("b", 24, 32)]


def save(folder, **files):
    for name, state in files.items():
        torch.save(state, folder / f"pytorch_model{name}.bin")


def test_pickled_tensors_are_mapped_and_joined(tmp_path):
    numbers = {"x": torch.arange(6.0).view(2, 3), "y": torch.ones(2, dtype=torch.bfloat16)}
    save(tmp_path, a={"x": numbers["x"]}, b={"y": numbers["y"]})
    tensors = torch_source(torch_files(tmp_path)).tensors
    assert torch.equal(tensors["x"].read((slice(1, 2),)), numbers["x"][1:]) and tensors["y"].dtype == "bfloat16"
    (tmp_path / "pytorch_model.bin.index.json").write_text('{"weight_map": {"x": "pytorch_modela.bin", "z": "gone.bin"}}')
    with pytest.raises(CheckpointError, match=r"gone\.bin"):
        torch_files(tmp_path)


class Mischief:
    def __reduce__(self):
        return (print, ("never printed",))


@pytest.mark.parametrize("state", [Mischief(), {"x": 1}, [torch.ones(1)]])
def test_files_with_more_than_tensors_are_refused(tmp_path, state, capsys):
    save(tmp_path, x=state)
    with pytest.raises(CheckpointError, match="pytorch_modelx"):
        torch_source(torch_files(tmp_path))
    assert "never printed" not in capsys.readouterr().out


def test_a_truncated_pickle_is_refused(tmp_path):
    save(tmp_path, x={"x": torch.arange(1000)})
    path = tmp_path / "pytorch_modelx.bin"
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(CheckpointError, match="can not be read as a file of tensors"):
        torch_source((path,))
