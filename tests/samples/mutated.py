"""Damaged and hostile checkpoints, drawn from a seed, and what comes of loading each in a process of its own."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import resource
import shutil
import struct
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch
from gguf_writer import write_gguf
from pagoda.hal.errors import ConfigError, PagodaError
from pagoda.models.direct import DirectRun
from pagoda.models.load import describe, load_model, open_checkpoint
from spec_samples import opened
from tiny_checkpoints import make

SECONDS = 20.0
ROOM = 1 << 30
"""Bytes of address space that a load may take beyond what the process has."""
PROMPT = [64, 70, 90, 8, 33]

ROPE = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 16}
STATES = {
    **EXPERTS, "shared_expert_intermediate_size": 20, "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4,
}  # fmt: skip
FOLDERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"rope_parameters": ROPE}),
    "gemma2": ("Gemma2", {"head_dim": 16, "sliding_window": 9}),
    "qwen3_moe": ("Qwen3Moe", EXPERTS),
    "qwen3_next": ("Qwen3Next", STATES),
    "mamba2": ("Mamba2", {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2, "num_hidden_layers": 2, "hidden_size": 32}),
}
FILES = {
    "llama.gguf": ("Llama", {"rope_parameters": ROPE, "hidden_size": 64}),
    "qwen3.gguf": ("Qwen3", {"hidden_size": 64, "head_dim": 16}),
}


class Case(NamedTuple):
    """A damaged copy at `path`. `exact`: it must be refused or give the very answer of the sound one; otherwise what it says may be
    another model's."""

    path: Path
    kind: str
    base: str
    exact: bool


class Outcome(NamedTuple):
    """`ended`: "same", "other", "refused", or what must not be: "foreign", "memory", "hang", "crash", "wrong"."""

    ended: str
    error: str = ""
    message: str = ""

    @property
    def fault(self) -> bool:
        return self.ended in ("foreign", "memory", "hang", "crash", "wrong")


def make_bases(folder: Path) -> dict[str, Path]:
    """Sound checkpoints by name: folders of two shards with an index, and GGUF files."""
    for name, (kind, values) in FOLDERS.items():
        make(folder / name, kind, **values).save_pretrained(folder / name, max_shard_size="20KB")
        (folder / name / "model.safetensors").unlink(missing_ok=True)
    for name, (kind, values) in FILES.items():
        write_gguf(make(folder / f"{name}.source", kind, **values), folder / name)
    return {name: folder / name for name in (*FOLDERS, *FILES)}


def cases(bases: dict[str, Path], folder: Path, seed: int, count: int) -> Iterator[Case]:
    """Each lies in `folder` until the next is drawn."""
    rng = Random(seed)
    for number in range(count):
        base = rng.choice([*FOLDERS, *FILES, *FILES])
        path = folder / f"{number}-{base}"
        if bases[base].is_dir():
            shutil.copytree(bases[base], path)
            mutate: Callable[[Path, Random], str] = rng.choice([*WEIGHTS, *WEIGHTS, *CONFIGS])
            kind, exact = mutate(path, rng), mutate in WEIGHTS
        else:
            shutil.copy(bases[base], path)
            mutate = rng.choice(GGUFS)
            kind, exact = mutate(path, rng), mutate in EXACT_GGUFS
        yield Case(path, kind, base, exact)
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def run_case(case: Case, sound: list[int]) -> Outcome:
    """Load it in a fork of this process, with limits; `sound`: what the checkpoint answers when nothing is wrong with it."""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=_in_child, args=(case.path, theirs))
    child.start()
    theirs.close()
    try:
        if not ours.poll(SECONDS):
            return Outcome("hang")
        outcome, tokens = ours.recv()
    except EOFError:
        child.join()
        return Outcome("crash", message=f"exit code {child.exitcode}")
    finally:
        child.kill()
        child.join()
        ours.close()
    if outcome.ended != "same" or tokens == sound:
        return outcome
    return Outcome("wrong" if case.exact else "other")


def answer(path: Path) -> list[int]:
    """Greedy tokens of the checkpoint at `path`."""
    device, table = opened()
    checkpoint = open_checkpoint(path)
    description = describe(checkpoint, dtype="float32", table=table)
    if description.facts.max_positions < 16:  # what an engine would refuse to be configured for
        raise ConfigError(f"{path.name} allows {description.facts.max_positions} positions")
    model = load_model(description, device, table)
    ((tokens, _),) = DirectRun(model, device, 1, 16).generate([PROMPT], 6)
    return tokens


def _in_child(path: Path, pipe: Any) -> None:
    torch.set_num_threads(1)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + ROOM
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        tokens = answer(path)
        pipe.send((Outcome("same"), tokens))
    except PagodaError as error:
        pipe.send((Outcome("refused", type(error).__name__, str(error)[:2000]), []))
    except MemoryError as error:
        pipe.send((Outcome("memory", "MemoryError", str(error)[:500]), []))
    except BaseException as error:  # what must not come out of a load
        kind = "memory" if "memory" in str(error) else "foreign"
        pipe.send((Outcome(kind, type(error).__name__, _where(error)), []))


def _where(error: BaseException) -> str:
    trace, last = error.__traceback__, ""
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if "/torch/" not in name:
            last = f"{Path(name).name}:{trace.tb_lineno}"
        trace = trace.tb_next
    return f"{last}: {str(error)[:300]}"


# Safetensors


def _shard(path: Path, rng: Random) -> Path:
    return rng.choice(sorted(path.glob("*.safetensors")))


def _header(data: bytes) -> tuple[dict[str, Any], bytes]:
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def _joined(header: dict[str, Any], body: bytes) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def header_bits(path: Path, rng: Random) -> str:
    file = _shard(path, rng)
    data = bytearray(file.read_bytes())
    end = 8 + int.from_bytes(data[:8], "little")
    for _ in range(rng.choice((1, 1, 1, 4))):
        data[rng.randrange(end)] ^= 1 << rng.randrange(8)
    file.write_bytes(data)
    return "bits of a header flipped"


def truncated(path: Path, rng: Random) -> str:
    file = _shard(path, rng)
    data = file.read_bytes()
    file.write_bytes(data[: rng.choice((0, 4, 8, rng.randrange(len(data)), len(data) - 1))])
    return "shard truncated"


def stray(path: Path, rng: Random) -> str:
    file = _shard(path, rng)
    file.write_bytes(file.read_bytes() + bytes(rng.randrange(1, 100)))
    return "bytes after a shard"


def header_length(path: Path, rng: Random) -> str:
    file = _shard(path, rng)
    file.write_bytes(rng.choice((0, 1, 2**31, 2**63, 2**64 - 1)).to_bytes(8, "little") + file.read_bytes()[8:])
    return "header length"


def entry(path: Path, rng: Random) -> str:
    """One tensor's entry says something else."""
    file = _shard(path, rng)
    header, body = _header(file.read_bytes())
    name = rng.choice([key for key in header if key != "__metadata__"])
    one = header[name]
    changes: dict[str, Callable[[], Any]] = {
        "dtype": lambda: rng.choice(("F16", "I32", "F64", "U8", "F4", "", None, 7, "BOOL")),
        "shape": lambda: rng.choice(([2**40, 2**40], [-1], [0], [], one["shape"][::-1], [*one["shape"], 1], [1.5], "x", [2**63], [10**30])),
        "data_offsets": lambda: rng.choice(([0, 2**60], [-4, 4], [4], [1, 0], [0, 0], "x", [0.0, 4.0], [2**64, 2**64 + 4])),
    }
    what = rng.choice(sorted(changes))
    before = one[what]
    header[name] = {**one, what: changes[what]()}
    if header[name][what] == before:
        header.pop(name)
    file.write_bytes(_joined(header, body))
    return f"{what} of a tensor"


def missing(path: Path, rng: Random) -> str:
    """A tensor is left out, in the file and in the index."""
    file = _shard(path, rng)
    header, body = _header(file.read_bytes())
    last = max((key for key in header if key != "__metadata__"), key=lambda key: header[key]["data_offsets"])
    begin, _ = header.pop(last)["data_offsets"]
    file.write_bytes(_joined(header, body[:begin]))
    _change_index(path, lambda names: names.pop(last))
    return "tensor missing"


def swapped(path: Path, rng: Random) -> str:
    """Two tensors of different shapes change names."""
    file = _shard(path, rng)
    header, body = _header(file.read_bytes())
    names = [key for key in header if key != "__metadata__"]
    first = rng.choice(names)
    others = [key for key in names if math.prod(header[key]["shape"]) != math.prod(header[first]["shape"])]
    other = rng.choice(others) if others else first
    header[first], header[other] = header[other], header[first]
    if not others:
        header[f"{first}.x"] = header.pop(first)
    file.write_bytes(_joined(header, body))
    return "tensors swapped"


def renamed(path: Path, rng: Random) -> str:
    file = _shard(path, rng)
    header, body = _header(file.read_bytes())
    name = rng.choice([key for key in header if key != "__metadata__"])
    new = rng.choice((name.upper(), name + "s", name.replace("layers.0", "layers.99"), name.replace("weight", "bias"), "")) or "x"
    new = new if new != name else f"{name}.2"
    header[new] = header.pop(name)
    file.write_bytes(_joined(header, body))
    _change_index(path, lambda names: names.update({new: names.pop(name)}))
    return "tensor renamed"


def not_json(path: Path, rng: Random) -> str:
    file = _shard(path, rng)
    text = rng.choice((b"[]", b"null", b"{", b'{"a":' * 5000, b"\xff\xfe", b'{"w": 3}', b'{"w": {"dtype": "F32"}}', b"[" * 100_000))
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(64))
    return "header is another JSON"


def index_file(path: Path, rng: Random) -> str:
    """The index of shards is wrong."""
    file = path / "model.safetensors.index.json"
    text = rng.choice(("", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 3}}', '{"weight_map": {"a": "../../x.safetensors"}}'))
    if rng.random() < 0.5:
        names = json.loads(file.read_text())
        key = rng.choice(sorted(names["weight_map"]))
        names["weight_map"][key] = rng.choice(("model-00009-of-00009.safetensors", "/etc/passwd", "", "x\0y"))
        text = json.dumps(names)
    file.write_text(text)
    return "index of shards"


def lost_shard(path: Path, rng: Random) -> str:
    _shard(path, rng).unlink()
    return "shard missing"


def _change_index(path: Path, change: Callable[[dict[str, str]], Any]) -> None:
    file = path / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    change(index["weight_map"])
    file.write_text(json.dumps(index))


# config.json

STRANGE = (None, True, -1, 0, 1, 3, 2**31, 10**12, 10**30, 1.5, -0.5, 1e308, "", "x", "silu", [], [1], {}, {"a": 1}, [None] * 3, "\0")


def _places(config: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    for key, value in config.items():
        yield (*path, key)
        if isinstance(value, dict):
            yield from _places(value, (*path, key))


def _config(path: Path, change: Callable[[dict[str, Any]], str]) -> str:
    file = path / "config.json"
    config = json.loads(file.read_text())
    what = change(config)
    file.write_text(json.dumps(config))
    return what


def config_key(path: Path, rng: Random) -> str:
    """A key is gone, or has a strange value, at any depth."""

    def change(config: dict[str, Any]) -> str:
        *above, key = rng.choice(list(_places(config)))
        inner = config
        for name in above:
            inner = inner[name]
        if rng.random() < 0.3:
            del inner[key]
            return "key of config.json missing"
        inner[key] = deepcopy(rng.choice(STRANGE))
        return "value of config.json"

    return _config(path, change)


def config_sizes(path: Path, rng: Random) -> str:
    """Sizes that do not go with the weights or with each other."""

    def change(config: dict[str, Any]) -> str:
        names = [key for key, value in config.items() if type(value) is int and "token_id" not in key]
        for name in rng.sample(names, rng.choice((1, 1, 2, 3))):
            config[name] = rng.choice((config[name] + 1, config[name] * 2, max(config[name] // 2, 1), 2**40, 10**9, -config[name], 7))
        return "sizes of config.json"

    return _config(path, change)


def config_names(path: Path, rng: Random) -> str:
    """An unknown rope, activation, architecture or format."""

    def change(config: dict[str, Any]) -> str:
        name, values = rng.choice(
            (
                ("rope_parameters", ({"rope_type": "spiral", "rope_theta": 1e4}, {"rope_type": None}, {"rope_theta": 0}, [],
                                     {"rope_theta": "x"}, {"rope_type": "llama3"}, {"rope_type": "yarn", "factor": 0},
                                     {"rope_type": "linear", "factor": -2.0})),
                ("rope_scaling", ({"type": "spiral", "factor": 2.0}, {"type": "yarn"}, {"rope_type": "longrope", "short_factor": []},
                                  "x", 3)),
                ("hidden_act", ("swoosh", "", None, 3)),
                ("architectures", (["WizardForCausalLM"], [], "LlamaForCausalLM", [3], None, ["BertModel"],
                                   ["MixtralForCausalLM"])),
                ("model_type", ("wizard", "", None, 7, "bert", "t5")),
                ("quantization_config", ({"quant_method": "magic"}, {}, [], {"quant_method": "fp8"},
                                         {"quant_method": "gptq", "bits": 3}, 4)),
                ("torch_dtype", ("float8", "complex64", 16, "int4")),
                ("layer_types", (["wizardry"] * 2, [], ["full_attention"], ["full_attention"] * 99, "full_attention")),
            )
        )  # fmt: skip
        config[name] = deepcopy(rng.choice(values))
        return f"{name} of config.json"

    return _config(path, change)


def config_text(path: Path, rng: Random) -> str:
    file = path / "config.json"
    text = file.read_bytes()
    choices = (b"", b"[]", b"null", text[: rng.randrange(len(text))], b"\xff" + text, b"{" * 5000, b"[" * 100_000, text + b"}", b"3")
    file.write_bytes(rng.choice(choices))
    return "text of config.json"


def config_bits(path: Path, rng: Random) -> str:
    file = path / "config.json"
    data = bytearray(file.read_bytes())
    for _ in range(rng.choice((1, 2, 8))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    file.write_bytes(data)
    return "bits of config.json flipped"


# GGUF


def _first_metadata(data: bytes) -> int:
    """Where the first key begins: magic, version, two counts."""
    assert data[:4] == b"GGUF"
    return 24


def gguf_bits(path: Path, rng: Random) -> str:
    data = bytearray(path.read_bytes())
    end = rng.choice((64, 1024, 4096))
    for _ in range(rng.choice((1, 1, 1, 4))):
        data[rng.randrange(min(end, len(data)))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)
    return "bits of GGUF metadata flipped"


def gguf_truncated(path: Path, rng: Random) -> str:
    data = path.read_bytes()
    path.write_bytes(data[: rng.choice((0, 3, 4, 23, 24, rng.randrange(4096), rng.randrange(len(data)), len(data) - 1))])
    return "GGUF truncated"


def gguf_counts(path: Path, rng: Random) -> str:
    """The counts of tensors and of values."""
    data = bytearray(path.read_bytes())
    at = rng.choice((8, 16))
    (count,) = struct.unpack_from("<Q", data, at)
    struct.pack_into("<Q", data, at, rng.choice((0, count - 1, count + 1, 2**31, 2**48, 2**64 - 1)))
    path.write_bytes(data)
    return "GGUF counts"


def gguf_number(path: Path, rng: Random) -> str:
    """Any eight bytes of the head: lengths of strings and lists, sizes, offsets."""
    data = bytearray(path.read_bytes())
    at = rng.randrange(_first_metadata(data), min(6000, len(data) - 8))
    struct.pack_into("<Q", data, at, rng.choice((0, 1, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1)))
    path.write_bytes(data)
    return "number in the head of a GGUF"


def gguf_name(path: Path, rng: Random) -> str:
    """A tensor is called something else."""
    data = path.read_bytes()
    name = rng.choice((b"token_embd.weight", b"blk.0.attn_q.weight", b"blk.1.ffn_down.weight", b"output_norm.weight"))
    at = data.rindex(name)
    path.write_bytes(data[:at] + bytes(reversed(name)) + data[at + len(name) :])
    return "GGUF tensor renamed"


def gguf_key(path: Path, rng: Random) -> str:
    """A key of the metadata is another: one that the model needs is missing."""
    data = path.read_bytes()
    names = (
        b".block_count",
        b".embedding_length",
        b".attention.head_count",
        b".feed_forward_length",
        b"general.architecture",
        b".context_length",
    )
    name = rng.choice(names)
    at = data.index(name)
    path.write_bytes(data[:at] + b"z" * len(name) + data[at + len(name) :])
    return "GGUF key missing"


WEIGHTS = (
    header_bits,
    header_bits,
    truncated,
    stray,
    header_length,
    entry,
    entry,
    missing,
    swapped,
    renamed,
    not_json,
    index_file,
    lost_shard,
)
CONFIGS = (config_key, config_key, config_key, config_sizes, config_sizes, config_names, config_names, config_text, config_bits)
EXACT_GGUFS = (gguf_truncated, gguf_counts, gguf_name)
GGUFS = (gguf_bits, gguf_bits, gguf_bits, gguf_number, gguf_number, gguf_key, *EXACT_GGUFS)
