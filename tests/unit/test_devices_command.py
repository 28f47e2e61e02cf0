"""`pagoda devices` prints what discovery finds."""

from __future__ import annotations

import json

import pytest
from pagoda.hal.discovery import find
from pagoda.ops.table import candidates, kernel_table
from pagoda.serving.cli.devices import describe_all, devices


def test_every_backend_has_a_record_with_its_devices() -> None:
    records = {record["name"]: record for record in describe_all(kernels=True)}
    cpu = records["cpu"]
    assert cpu["available"] and not cpu["instrument"] and cpu["devices"][0]["model"] == find("cpu").describe().model
    assert {kernel["op"] for kernel in cpu["devices"][0]["kernels"]} >= {"gemm", "paged_attention", "sample"}
    assert records["null"]["instrument"]


def test_the_command_prints_text_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    devices(kernels=True)
    text = capsys.readouterr().out
    assert "cpu" in text and "gemm" in text and "reference" in text
    devices(as_json=True)
    assert [record["name"] for record in json.loads(capsys.readouterr().out)] == [record["name"] for record in describe_all()]


def test_a_table_has_references_for_every_device() -> None:
    for name in ("cpu", "reference", "null"):
        backend = find(name)
        assert {kernel.op for kernel in candidates(backend) if kernel.name == "reference"} >= {"gemm", "route", "sample"}
        assert kernel_table(backend, backend.describe()).info == backend.describe()
