"""Prompts that come as rows of embeddings: read from bytes that strangers send, checked, and cut into items that the engine can find again.

No pickle is run: `torch.save`'s files are looked through before torch's restricted loader sees them, safetensors have none.
"""

from __future__ import annotations

import base64
import binascii
import io
import json
import zipfile
from importlib import import_module
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
from pagoda.hal.errors import RequestError
from pagoda.models.media import EMBEDS, MediaItem, Numbers, digest_of

if TYPE_CHECKING:
    from torch import Tensor

PARAM = "prompt_embeds"
PLACEHOLDER = 0
"""The token that stands in a prompt for a row; nothing is made of it."""

_DTYPES = ("float32", "float16", "bfloat16")
_STORED = {"F32": ("float32", 4), "F16": ("float16", 2), "BF16": ("bfloat16", 2)}
_ZIP, _ROOM = b"PK\x03\x04", 1 << 16


def rows_of_text(text: str, width: int, most: int) -> Numbers:
    """Of base64; see `rows_of_bytes`."""
    try:
        blob = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise _wrong(f"is no base64: {error}") from None
    return rows_of_bytes(blob, width, most)


def rows_of_bytes(blob: bytes, width: int, most: int) -> Numbers:
    """Rows `[n, width]`, n from 1 to `most`, of a file that `torch.save` wrote of one tensor, or of safetensors with one.

    Raises `RequestError` saying what is wrong with it.
    """
    if blob.startswith(_ZIP):
        return rows_of_tensor(_torch_saved(blob), width, most)
    return rows_of_tensor(_safetensors(blob), width, most)


def rows_of_tensor(given: Any, width: int, most: int) -> Numbers:
    """Of a tensor of torch; see `rows_of_bytes`. A first dimension of 1 may stand before the others."""
    torch = import_module("torch")
    if not isinstance(given, torch.Tensor) or given.layout is not torch.strided or given.is_quantized or given.is_meta:
        raise _wrong(f"holds {_kind(given)}; it must be one dense tensor")
    tensor: Tensor = given[0] if given.dim() == 3 and given.shape[0] == 1 else given
    if (name := str(tensor.dtype).removeprefix("torch.")) not in _DTYPES:
        raise _wrong(f"is of {name}; it must be of {', '.join(_DTYPES)}")
    if tensor.dim() != 2 or tensor.shape[1] != width:
        raise _wrong(f"has the shape {list(given.shape)}; it must be [tokens, {width}], {width} being the width of this model")
    if not tensor.shape[0]:
        raise _wrong("has no row; it needs at least one")
    if tensor.shape[0] > most:  # before it is copied: rows may share their bytes
        raise _wrong(f"has {tensor.shape[0]} rows, of which at most {most} leave room for an answer; shorten it", "context_length_exceeded")
    if not bool(torch.isfinite(tensor).all()):
        raise _wrong("holds numbers that are not finite")
    made: Numbers = import_module("pagoda.models.media_tensors").numbers_of(tensor)
    return made


def items_of(rows: Numbers, page: int) -> tuple[MediaItem, ...]:
    """An item for each page of so many tokens, so that prompts which begin alike share pages."""
    array = np.frombuffer(rows.data, rows.dtype).reshape(rows.shape)
    made = []
    for offset in range(0, len(array), page):
        part = array[offset : offset + page]
        tensors = {EMBEDS: Numbers(rows.dtype, tuple(part.shape), part.tobytes())}
        made.append(MediaItem(EMBEDS, digest_of(EMBEDS, (), tensors), offset, len(part), tensors))
    return tuple(made)


def cut(rows: Numbers, kept: range) -> Numbers:
    """These rows alone."""
    array = np.frombuffer(rows.data, rows.dtype).reshape(rows.shape)[kept.start : kept.stop]
    return Numbers(rows.dtype, tuple(array.shape), array.tobytes())


def _torch_saved(blob: bytes) -> Any:
    try:
        with zipfile.ZipFile(io.BytesIO(blob)) as file:
            parts = file.infolist()
        if any(part.compress_type != zipfile.ZIP_STORED for part in parts) or sum(part.file_size for part in parts) > len(blob) + _ROOM:
            raise _wrong("is a compressed file; send what torch.save writes")
        return import_module("torch").load(io.BytesIO(blob), map_location="cpu", weights_only=True)
    except RequestError:
        raise
    except Exception as error:  # whatever a loader says of a file that is none
        first = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise _wrong(f"cannot be read as a tensor that torch.save wrote: {first}") from None


def _safetensors(blob: bytes) -> Any:
    size = int.from_bytes(blob[:8], "little")
    try:
        header = json.loads(blob[8 : 8 + size]) if 8 + size <= min(len(blob), 8 + _ROOM) else None
        entries = [value for name, value in header.items() if name != "__metadata__"] if isinstance(header, dict) else []
        (entry,) = entries
        name, each = _STORED[entry["dtype"]]
        begin, end = entry["data_offsets"]
        shape = tuple(entry["shape"])
        right = all(isinstance(one, int) and one >= 0 for one in (*shape, begin, end)) and end - begin == each * prod(shape)
    except (ValueError, KeyError, TypeError, RecursionError):
        raise _wrong("is neither a file of torch.save nor safetensors with one tensor of F32, F16 or BF16") from None
    data = blob[8 + size + begin : 8 + size + end] if right else b""
    if not right or len(data) != end - begin:
        raise _wrong("is safetensors whose header does not fit what follows it")
    torch = import_module("torch")
    flat = torch.frombuffer(bytearray(data), dtype=getattr(torch, name)) if data else torch.empty(0)
    return flat.reshape(shape)


def _kind(given: Any) -> str:
    return f"a tensor of layout {given.layout}" if hasattr(given, "layout") else f"a {type(given).__name__}"


def _wrong(what: str, code: str | None = None) -> RequestError:
    return RequestError(f"prompt_embeds {what}", param=PARAM, code=code)
