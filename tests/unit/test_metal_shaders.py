"""Our Metal shaders, compiled for the host, against each primitive's float64 oracle over all of its cases, and against MLX on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from metal_on_host import HEADER, KERNEL, Host
from pagoda.backends.metal import shaders
from pagoda.hal.discovery import find
from pagoda.hal.kernel import Kernel
from pagoda.ops.activation import ActivationFacts
from pagoda.ops.check import check_kernel
from pagoda.ops.norm import NormFacts
from pagoda.ops.registry import ALL_OPS
from pagoda.ops.rope import RopeFacts

KERNELS = {f"{kernel.op}={kernel.name}": kernel for kernel in find("metal").kernels()}


@pytest.fixture(scope="module", autouse=True)
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.mps, "compile_shader", Host(tmp_path_factory.mktemp("shaders")).compile_shader)
        shaders.library.cache_clear()
        yield
        shaders.library.cache_clear()


def test_every_shader_has_a_record() -> None:
    assert sorted(KERNEL.findall(shaders.SOURCE.read_text())) == sorted({kernel.op for kernel in KERNELS.values()} - {"add_rms_norm"})
    assert HEADER.is_dir()


@pytest.mark.heavy
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", sorted(KERNELS))
def test_a_shader_is_what_its_oracle_says(name: str, dtype: str) -> None:
    kernel: Kernel = KERNELS[name]
    op = ALL_OPS[kernel.op]
    # Fibers are slow: of attention every case in float32, in 16 bits every third.
    cases = islice(op.generate(torch.Generator().manual_seed(0), dtype), None, None, 3 if "attention" in name and dtype != "float32" else 1)
    report = check_kernel(kernel, op, dtype=dtype, info=find("metal").describe("m4-max"), cases=cases)
    assert report.ran > 5 and not report.failures, str(report)


def test_a_missing_barrier_shows(tmp_path: Path) -> None:
    """The stand-in is no use if it runs threads so kindly that a race stays hidden."""
    text = shaders.SOURCE.read_text().replace("SCALAR", "float").replace("CACHE", "float")
    start = text.index("#define REDUCED")
    end = text.index("inline float added")
    careless = text[:start] + text[start:end].replace("threadgroup_barrier(mem_flags::mem_threadgroup);", "", 1) + text[end:]
    assert careless != text
    x, outs = torch.randn(3, 300), []
    for source in (text, careless):
        out = torch.empty_like(x)
        Host(tmp_path).compile_shader(source).rms_norm(
            out, out, x, x, x, 1, 300, 0, 300, 0, 0, 1e-6, 0.0, threads=[3 * shaders.SIZE], group_size=[shaders.SIZE]
        )  # fmt: skip
        outs.append(out)
    torch.testing.assert_close(outs[0], torch.nn.functional.rms_norm(x, (300,), eps=1e-6))
    assert not torch.allclose(outs[0], outs[1])


def test_mlx_computes_the_same(require: Callable[[str, bool], None]) -> None:
    """MLX's own kernels, on the CPU, as a second opinion on norm, rotation and gated activation."""
    require("mlx", find_spec("mlx") is not None)
    import mlx.core as mx  # type: ignore[import-not-found, unused-ignore]

    def to_mlx(x: torch.Tensor) -> Any:
        return mx.array(x.numpy())

    def agree(ours: torch.Tensor, theirs: Any) -> None:
        torch.testing.assert_close(ours, torch.tensor(theirs.tolist()), rtol=1e-5, atol=1e-5)

    gen = torch.Generator().manual_seed(5)
    x, weight = torch.randn(7, 96, generator=gen), torch.randn(96, generator=gen)
    norm = KERNELS["rms_norm=metal"].load(NormFacts("float32", 96, 1e-5))
    agree(norm.run({"weight": weight}, x), mx.fast.rms_norm(to_mlx(x), to_mlx(weight), 1e-5))
    gate, up = mx.split(to_mlx(x), 2, axis=-1)
    agree(KERNELS["gated_activation=metal"].load(ActivationFacts("float32", "silu")).run(x), gate * mx.sigmoid(gate) * up)
    q, k = torch.randn(7, 4, 32, generator=gen), torch.randn(7, 2, 32, generator=gen)
    angle = torch.arange(7.0)[:, None] * 10000.0 ** -(torch.arange(0, 32, 2) / 32)
    for style in ("neox", "interleaved"):
        turned = KERNELS["rope=metal"].load(RopeFacts("float32", 32, 32, style)).run(q.clone(), k.clone(), angle.cos(), angle.sin())
        for ours, given in zip(turned, (q, k), strict=True):
            heads_first = to_mlx(given.transpose(0, 1).contiguous())
            theirs = mx.fast.rope(heads_first, 32, traditional=style == "interleaved", base=10000.0, scale=1.0, offset=0)
            agree(ours.transpose(0, 1), theirs)
