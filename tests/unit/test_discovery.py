"""Discovery: built-ins and strangers are found the same way, and nobody's failure harms another."""

from __future__ import annotations

from pathlib import Path

import pytest
from pagoda.hal.discovery import choose, find, find_all, plugin_kernels
from pagoda.hal.errors import DeviceError


def install(folder: Path, name: str, points: str, source: str = "") -> None:
    """A distribution `name` with entry points, and a module of the same name."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(points)
    if source:
        (folder / f"{name}.py").write_text(source)


BACKEND = """
from pagoda.hal.info import Probe
class B:
    name = "{name}"
    contract = {contract}
    def probe(self): {probe}
"""


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_built_ins_are_listed_best_first() -> None:
    names = [one.name for one in find_all()]
    assert {"cpu", "null", "reference"} <= set(names)
    available = [one.probe.available for one in find_all()]
    assert available == sorted(available, reverse=True)
    assert all(one.probe.message for one in find_all())


def test_auto_never_takes_an_instrument(plugins: Path) -> None:
    source = BACKEND.format(name="fast", contract=1, probe='return Probe(True, "here", 10**6)')
    install(plugins, "fast", "[pagoda.backends]\nfast = fast:B\nfake = fast:B\n", source)
    assert choose().backend.name == "fast"
    assert choose("null").backend.name == "null"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("", "is not in this installation: No module named 'odd"),
        ("raise OSError('libodd.so is missing')", "libodd.so is missing"),
        (BACKEND.format(name="odd", contract=0, probe="return None"), "written for contract 0, this Pagoda has 1"),
        (BACKEND.format(name="odd", contract=1, probe="raise RuntimeError('driver')"), "its probe failed: RuntimeError"),
        ("class C: pass", "has no attribute 'B'"),
    ],
)
def test_a_broken_plugin_is_listed_with_the_reason(plugins: Path, source: str, reason: str, request: pytest.FixtureRequest) -> None:
    name = f"odd{abs(hash(source)) % 10**6}"
    install(plugins, name, f"[pagoda.backends]\n{name} = {name}:B\n", source.replace('"odd"', f'"{name}"'))
    listed = {one.name: one for one in find_all()}
    assert not listed[name].probe.available and reason in listed[name].probe.message
    assert listed["cpu"].probe.available and choose().backend.name == "cpu"
    with pytest.raises(DeviceError):
        choose(name)


def test_unknown_and_unavailable_devices_say_what_there_is(plugins: Path) -> None:
    with pytest.raises(DeviceError, match=r"no such device 'warp'; installed backends: .*cpu.*or auto"):
        find("warp")
    install(
        plugins,
        "away",
        "[pagoda.backends]\naway = away:B\n",
        BACKEND.format(name="away", contract=1, probe='return Probe(False, "plug it in")'),
    )
    with pytest.raises(DeviceError, match="'away' is not available: plug it in"):
        choose("away")


def test_two_packages_with_one_name_are_refused(plugins: Path) -> None:
    source = BACKEND.format(name="twin", contract=1, probe='return Probe(True, "here")')
    install(plugins, "twin_a", "[pagoda.backends]\ntwin = twin_a:B\n", source)
    install(plugins, "twin_b", "[pagoda.backends]\ntwin = twin_b:B\n", source)
    with pytest.raises(DeviceError, match=r"offered by .*uninstall all but one"):
        find("twin")


def test_kernels_for_somebody_elses_device(plugins: Path) -> None:
    source = "from pagoda.hal.kernel import Kernel\ndef k(device):\n    return [Kernel('gemm', 'mine', 'x:y')] if device == 'cpu' else []\n"
    install(plugins, "extra_k", "[pagoda.kernels]\nextra = extra_k:k\n", source)
    assert [kernel.name for kernel in plugin_kernels("cpu")] == ["mine"]
    assert plugin_kernels("null") == ()
    install(plugins, "bad_k", "[pagoda.kernels]\nbad = bad_k:k\n", "raise ImportError('no')")
    with pytest.raises(DeviceError, match="kernel plugin 'bad'"):
        plugin_kernels("cpu")
