"""Compiled kernels on disk: what is fetched from a folder or over HTTP is what was built, bit for bit, and nothing damaged gets in."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from pagoda.hal.errors import ConfigError, DeviceError
from pagoda.hal.info import DeviceInfo
from pagoda.ops import kernel_store
from pagoda.ops.kernel_store import INDEX, Key
from pagoda.ops.native import library
from pagoda.serving.cli import kernels
from pagoda.serving.cli.kernels_build import described
from pagoda.serving.cli.kernels_fetch import fetch_from

KEY = Key("sm90", "triton 3.6.0", "0123456789ab")


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def built(tmp_path: Path) -> Path:
    root = tmp_path / "built"
    for name, data in {"AB/attend.cubin": bytes(range(256)) * 40, "AB/__grp__attend.json": b"{}", "CD/merge.cubin": b"\x7fELF"}.items():
        path = root / KEY.name / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    kernel_store.write_index(root, KEY, "a model in bfloat16")
    return root


@pytest.fixture
def address(built: Path) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(built))) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def content(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def test_fetched_over_http_equals_built(built: Path, address: str, tmp_path: Path) -> None:
    (entry,) = fetch_from(address, tmp_path / "fetched", [Key("sm80", "triton 3.6.0", "x"), KEY])
    assert content(tmp_path / "fetched") == content(built)
    assert entry.kernels == 2 and entry.index is not None and entry.index["built"] == ["a model in bfloat16"]


def test_a_second_fetch_repairs(built: Path, tmp_path: Path) -> None:
    root = tmp_path / "fetched"
    fetch_from(str(built), root, [KEY])
    (root / KEY.name / "CD/merge.cubin").write_bytes(b"cut")
    fetch_from(str(built), root, [KEY])
    assert content(root) == content(built)


@pytest.mark.parametrize("name", ["CD/merge.cubin", INDEX])
def test_damage_is_found(built: Path, tmp_path: Path, name: str) -> None:
    path = built / KEY.name / name
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(ConfigError, match="sha256"):
        fetch_from(str(built), tmp_path / "fetched", [KEY])
    assert not (tmp_path / "fetched" / KEY.name / INDEX).exists()


@pytest.mark.parametrize("name", ["../../evil", "/tmp/evil", "a/../../b", "c:\\evil", ""])
def test_no_file_lies_outside(built: Path, tmp_path: Path, name: str) -> None:
    index = json.loads((built / KEY.name / INDEX).read_text())
    index["files"] = {name: {"sha256": "", "bytes": 0}}
    (built / KEY.name / INDEX).write_text(json.dumps(index))
    kernel_store.list_entries(built)
    with pytest.raises(ConfigError, match="no file within the entry"):
        fetch_from(str(built), tmp_path / "fetched", [KEY])


def test_what_is_not_offered_is_told(built: Path, address: str, tmp_path: Path) -> None:
    other = Key("sm90", "triton 3.6.0", "other sources")
    with pytest.raises(ConfigError, match=f"{KEY.name}.*needs {other.name}"):
        fetch_from(str(built), tmp_path, [other])
    with pytest.raises(ConfigError, match="could not be fetched"):
        fetch_from(f"{address}/nowhere", tmp_path, [KEY])


def test_the_command_from_build_to_clear(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made, got = str(tmp_path / "made"), str(tmp_path / "got")
    assert kernels.run(["build", "--target", "host", "--cache", made]) == 0
    assert kernels.run(["fetch", made, "--target", "host", "--cache", got]) == 0
    assert content(Path(made)) == content(Path(got))
    capsys.readouterr()
    assert kernels.run(["list", "--json", "--cache", got]) == 0
    (record,) = json.loads(capsys.readouterr().out)
    assert record["kernels"] == 1 and record["bytes"] > 100_000 and record["name"] == kernel_store.host_key().name
    assert kernels.run(["clear", "sm", "--cache", got]) == 0 and len(content(Path(got))) == 3
    assert kernels.run(["clear", "--cache", got]) == 0
    assert kernels.run(["list", "--cache", got]) == 0
    assert "nothing is compiled" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"build\|fetch\|list\|clear"):
        kernels.run(["bake"])


def test_a_fetched_library_serves_where_none_was_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kernels.run(["build", "--target", "host"])
    built = library.library_path()
    assert library._path.__wrapped__() == built
    monkeypatch.setattr(library, "library_path", lambda: tmp_path / "absent.so")
    assert library._path.__wrapped__() == tmp_path / "pagoda/kernels" / kernel_store.host_key().name / built.name


def test_targets_by_architecture() -> None:
    assert described("sm_90") == described("sm90") and described("sm90")[0] == "cuda"
    assert described("gfx1201")[1].arch == "gfx1201"
    with pytest.raises(DeviceError, match="gfx942"):
        described("sm_75")


def test_keys_change_with_what_they_are_of() -> None:
    plain = DeviceInfo("generic", "cpu", "x86-64", 0, 1, frozenset())
    assert kernel_store.key_of(plain) is None and kernel_store.use(plain) is None
    names = {Key("sm90", "triton 3.6.0", "a").name, Key("sm90", "triton 3.7.0", "a").name, Key("sm90", "triton 3.6.0", "b").name}
    assert len(names) == 3 and all(name.startswith("sm90-") for name in names)
