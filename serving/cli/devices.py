"""`pagoda devices`: every backend, what its probe says, its devices, and the kernels that each primitive could get there."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Any

import typer
from pagoda.hal.device import Backend
from pagoda.hal.discovery import INSTRUMENTS, Listed, find_all
from pagoda.hal.info import DeviceInfo
from pagoda.hal.kernel import Kernel


def devices(
    kernels: Annotated[bool, typer.Option("--kernels", help="Also list the kernels of each device, and why one does not fit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """List the devices that Pagoda can use here."""
    records = describe_all(kernels=kernels)
    typer.echo(json.dumps(records, indent=2) if as_json else "\n".join(_lines(records)))


def describe_all(*, kernels: bool = False) -> list[dict[str, Any]]:
    """One record a backend, best first: name, available, message, devices, and for each device its kernels where asked for."""
    return [_record(listed, kernels) for listed in find_all()]


def _record(listed: Listed, kernels: bool) -> dict[str, Any]:
    backend, probe = listed.backend, listed.probe
    infos = backend.devices() if backend is not None and probe.available else ()
    return {
        "name": listed.name,
        "available": probe.available,
        "message": probe.message,
        "score": probe.score,
        "instrument": listed.name in INSTRUMENTS,
        "devices": [_device(backend, info, kernels) for info in infos if backend is not None],
    }


def _device(backend: Backend, info: DeviceInfo, kernels: bool) -> dict[str, Any]:
    facts = {**asdict(info), "dtypes": sorted(info.dtypes), "features": sorted(feature.value for feature in info.features)}
    return {**facts, "kernels": _kernels(backend, info)} if kernels else facts


def _kernels(backend: Backend, info: DeviceInfo) -> list[dict[str, Any]]:
    from pagoda.ops.table import candidates  # brings torch, which a plain listing does not need

    return [_kernel(kernel, info) for kernel in sorted(candidates(backend), key=lambda kernel: kernel.op)]


def _kernel(kernel: Kernel, info: DeviceInfo) -> dict[str, Any]:
    return {
        "op": kernel.op,
        "name": kernel.name,
        "refused": kernel.needs.refuse_device(info),
        "dtypes": sorted(kernel.needs.dtypes),
        "claims": sorted(kernel.claims),
    }


def _lines(records: list[dict[str, Any]]) -> list[str]:
    width = max(len(record["name"]) for record in records)
    lines = []
    for record in records:
        lines.append(f"{record['name']:{width}}  {'yes' if record['available'] else 'no ':3}  {record['message']}")
        shown = record["devices"][:1] if record["instrument"] else record["devices"]
        for device in shown:
            lines += _device_lines(device, " " * (width + 7))
    return lines


def _device_lines(device: dict[str, Any], indent: str) -> list[str]:
    head = f"{device['index']}: {device['vendor']} {device['model']} ({device['arch']}), {device['memory_bytes'] / 2**30:.1f} GiB"
    lines = [f"{indent}{head}; {', '.join(device['dtypes'])}; {', '.join(device['features'])}"]
    ops = sorted({kernel["op"] for kernel in device.get("kernels", ())})
    for op in ops:
        names = [_kernel_word(kernel) for kernel in device["kernels"] if kernel["op"] == op]
        lines.append(f"{indent}   {op:20} {', '.join(names)}")
    return lines


def _kernel_word(kernel: dict[str, Any]) -> str:
    return kernel["name"] if kernel["refused"] is None else f"{kernel['name']} (no: {kernel['refused']})"
