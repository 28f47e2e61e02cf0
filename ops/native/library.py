"""The shared library of C++ kernels, loaded by ctypes: whether it is here, and its functions for one instruction set."""

from __future__ import annotations

import ctypes
from ctypes import CFUNCTYPE, POINTER, Structure, c_char_p, c_double, c_float, c_int, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

from pagoda.hal.errors import DeviceError
from pagoda.ops.kernel_store import kept_library
from pagoda.ops.native.build import library as library_path

TYPES = {"float32": 0, "bfloat16": 1}
"""Codes of the dtypes that the kernels compute in."""

PAGE_TYPES = TYPES | {"int8": 2}
"""Those of pages."""


@cache
def _path() -> Path:
    """Beside the sources, where it is built, or where `pagoda kernels fetch` keeps one of these very sources."""
    built, kept = library_path(), kept_library()
    return kept if kept.exists() and not built.exists() else built


def available() -> str | None:
    """None where the library of these sources was built, else the reason why not; loads nothing."""
    return None if _path().exists() else "the native library is not built (install g++ or clang++, then: python -m pagoda.ops.native.build)"


class GemmArgs(Structure):
    """`PgGemm`: a packed weight."""

    _fields_ = (("inner", c_int64), ("outer", c_int64), ("type", c_int32), ("any_order", c_int32), ("weight", c_void_p), ("bias", c_void_p))


class QuantArgs(Structure):
    """`PgQuant`: a weight in blocks of 4 or 8 bits."""

    _fields_ = (
        ("inner", c_int64), ("outer", c_int64), ("kind", c_int32), ("type", c_int32), ("weight", c_void_p), ("bias", c_void_p),
        ("grid", c_void_p), ("any_order", c_int32),
    )  # fmt: skip


QUANT_KINDS = {"Q4_0": 0, "Q4_1": 1, "Q5_0": 2, "Q5_1": 3, "Q8_0": 4, "IQ4_NL": 5}
"""ggml's formats in blocks of 32 that `quant_gemm` computes with, and their codes there."""

SUPER_KINDS = {
    name: 6 + code
    for code, name in enumerate(
        ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S", "IQ1_M")
    )
}
"""The same in super-blocks of 256, on every instruction set."""

BLOCK_KINDS = QUANT_KINDS | SUPER_KINDS


class AttentionArgs(Structure):
    """`PgAttention`: static facts of a layer."""

    _fields_ = (
        *((name, c_int32) for name in ("type", "kv_type", "heads", "kv_heads", "dim", "v_dim", "page_size", "causal", "any_order")),
        *((name, c_int64) for name in ("window", "chunk")),
        *((name, c_float) for name in ("scale", "softcap")),
    )


class BatchArgs(Structure):
    """`PgBatch`: a step's view of one cache group."""

    _fields_ = (
        ("query_start", c_void_p), ("seq_lens", c_void_p), ("table", c_void_p), ("table_stride", c_int64), ("rows", c_int64),
    )  # fmt: skip


class LoraArgs(Structure):
    """`PgLora`: room for adapters beside a linear layer."""

    _fields_ = (*((name, c_int64) for name in ("inner", "outer", "rank", "slots", "parts")), ("type", c_int32), ("columns", c_void_p))


class PagesArgs(Structure):
    """`PgPages`: a layer's pages and their element strides."""

    _fields_ = (
        ("k", c_void_p), ("v", c_void_p),
        *((name, c_int64) for name in ("k_page", "k_token", "k_head", "v_page", "v_token", "v_head")),
    )  # fmt: skip


_P, _N = c_void_p, c_int64

_FUNCTIONS: dict[str, Any] = {
    "pack": CFUNCTYPE(None, _P, _P, _N, _P),
    "gemm": CFUNCTYPE(None, _P, _P, _N, _N, _P, _N, c_int),
    "attention": CFUNCTYPE(None, _P, _P, _P, _P, _N, _N, _N, _P, _P, _P, c_int),
    "write_kv": CFUNCTYPE(None, _P, _P, _P, _N, _N, _P, _N, _N, _P, _N, c_int),
    "rope": CFUNCTYPE(None, _P, c_int, _N, _N, _N, _N, _N, c_int, _P, _P, _N, c_int),
    "rms_norm": CFUNCTYPE(None, _P, _N, _P, _N, _P, c_float, c_float, c_int, _N, _N, _P, _P, c_int),
    "gated_norm": CFUNCTYPE(None, _P, _N, _P, _N, _P, _N, c_float, c_int, c_int, c_int, _N, _N, _N, _P, c_int),
    "activation": CFUNCTYPE(None, _P, _N, c_int, c_int, c_int, c_float, c_float, c_float, _N, _N, _P, c_int),
    "argmax": CFUNCTYPE(None, _P, _N, c_int, _N, _N, _P, _P, _P, c_int),
    "bitmask": CFUNCTYPE(None, _P, _N, c_int, _N, _N, _P, c_int),
    "exp_row": CFUNCTYPE(c_double, _P, c_int, _N, _P, c_float, c_float, _P),
    "quant_bytes": CFUNCTYPE(_N, _P),
    "quant_pack": CFUNCTYPE(None, _P, _P, _N, _P),
    "quant_gemm": CFUNCTYPE(None, _P, _P, _N, _N, _P, _N, c_int),
    "gather": CFUNCTYPE(None, _P, _P, _N, _P, _N, c_int),
    "quant_gather": CFUNCTYPE(None, _P, _P, _N, _P, _N, c_int),
    "lora": CFUNCTYPE(None, _P, _P, _N, _P, _P, _P, _N, _P, c_int),
    "sample": CFUNCTYPE(None, _P, _P, _N, c_int, _N, _N, _P, _P, _P, _P, _P, _P, _P, _P, _P, c_int),
}
"""Members of `PgTable` after its name, in order; their arguments are described in `api.h`."""


class _Table(Structure):
    _fields_ = (("name", c_char_p), *((name, c_void_p) for name in _FUNCTIONS))


class Native:
    """The kernels for one instruction set; each function takes addresses and numbers as `api.h` says.

    Attributes:
        isa: name of the instruction set.
        table: address of the kernels' table.
    """

    def __init__(self, library: ctypes.CDLL, table: Any) -> None:
        self.isa: str = table.contents.name.decode()
        self.table = ctypes.addressof(table.contents)
        for name, kind in _FUNCTIONS.items():
            setattr(self, name, kind(getattr(table.contents, name)))
        self._library = library

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


class Program:
    """Kernel calls of one thread, recorded while they ran: `with Program() as program: …`, then `program.replay(first, last)`.

    Only addresses are kept: what they point to must stay where it is.
    """

    def __init__(self) -> None:
        self._library = _open()
        self._handle = c_void_p()

    def __enter__(self) -> Program:
        self._handle = c_void_p(self._library.pg_record())
        return self

    def __exit__(self, *_: object) -> None:
        self._library.pg_stop()

    def __len__(self) -> int:
        return int(self._library.pg_length(self._handle))

    def replay(self, first: int, last: int) -> None:
        """Run the calls [first, last) again."""
        self._library.pg_replay(self._handle, first, last)

    def __del__(self) -> None:
        if self._handle:
            self._library.pg_free(self._handle)


ISAS = ("amx", "avx512bf16", "avx512vnni", "avx512", "avx2", "i8mm", "dotprod", "baseline")
"""Names of all instruction sets that a library may hold, better ones first; `baseline` is NEON on 64-bit Arm."""


@cache
def load(isa: str | None = None) -> Native:
    """The kernels for `isa`, or for the best one that this processor has. Raises `DeviceError`.

    torch must have been imported: the library shares its OpenMP runtime, hence its threads.
    """
    reason = available()
    if reason is not None:
        raise DeviceError(f"native kernels were asked for, but {reason}")
    library = _open()
    table = library.pg_table(isa.encode() if isa else None)
    if not table:
        raise DeviceError(f"native kernels for {isa} were asked for; the processor or the library lacks it, there are {', '.join(here())}")
    return Native(library, table)


def here() -> tuple[str, ...]:
    """Instruction sets that this processor and the library have, best first; empty without the library."""
    if available() is not None:
        return ()
    library = _open()
    return tuple(isa for isa in ISAS if library.pg_table(isa.encode()))


@cache
def _open() -> ctypes.CDLL:
    library = ctypes.CDLL(str(_path()))
    for name, result, arguments in (
        ("pg_table", POINTER(_Table), (c_char_p,)),
        ("pg_record", c_void_p, ()),
        ("pg_stop", None, ()),
        ("pg_length", _N, (_P,)),
        ("pg_replay", None, (_P, _N, _N)),
        ("pg_free", None, (_P,)),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library
