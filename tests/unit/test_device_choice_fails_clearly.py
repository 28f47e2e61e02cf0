"""`--device X` for each of the eight where X is absent, half installed or broken: one sentence that says what to do next."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pagoda.backends.cpu import backend as cpu
from pagoda.backends.cuda import backend as cuda
from pagoda.hal.discovery import choose, find
from pagoda.hal.errors import DeviceError
from pagoda.serving.cli.main import main

NEXT = {
    "cuda": "install torch's CUDA build",
    "rocm": "install torch's ROCm build",
    "xpu": "install torch's XPU build",
    "tpu": "pip install torch-xla",
    "gaudi": "habanalabs-installer.sh",
    "ascend": "pip install torch-npu",
    "metal": "pip install torch on macOS",
}
"""Device → what a machine lacks that has the hardware alone; `cpu` is always whole."""


def sentence(name: str) -> str:
    with pytest.raises(DeviceError) as found:
        choose(name)
    message = str(found.value)
    assert message.startswith(f"device {name!r} is not available: ") and "\n" not in message and "Traceback" not in message, message
    return message


@pytest.mark.parametrize("name", sorted(NEXT))
def test_an_absent_device(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    if find(name).probe().available:
        return  # it is here: the device's own suite has it
    message = sentence(name)
    assert any(word in message for word in ("install", "it needs a")), message
    code = main(["conformance", "--device", name])
    assert (code != 0, capsys.readouterr().err) == (True, f"pagoda: {message}\n")


@pytest.mark.parametrize("name", sorted(NEXT))
def test_hardware_without_its_software(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = tmp_path / "nvidia0"
    seen.touch()
    if name == "cuda":
        monkeypatch.setattr(cuda, "_device_files", lambda: [seen])
        monkeypatch.setattr(cuda, "_torch_has_cuda", lambda: False)
    else:
        backend: Any = find(name)
        missing = {"package": "nobodys-package"} if backend.vendor.package != "torch" else {"library": "libnobodys*"}
        monkeypatch.setattr(type(backend), "vendor", replace(backend.vendor, files=str(seen), **missing))
    message = sentence(name)
    assert "1 " in message and "but" in message and NEXT[name] in message, message


def test_the_processor_is_always_here(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose("cpu").probe.available and "built" not in choose("cpu").probe.message
    monkeypatch.setattr(cpu, "available", lambda: "the native library is not built (build it)")
    assert "the native library is not built (build it)" in choose("cpu").probe.message
    with pytest.raises(DeviceError, match="cpu device 1 was asked for; there is one, number 0"):
        find("cpu").open(1)


def test_a_name_that_nobody_has(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conformance", "--device", "abacus"]) != 0
    told = capsys.readouterr().err
    assert "no such device 'abacus'" in told and all(name in told for name in (*NEXT, "cpu", "auto"))
