"""Programs that Triton makes of kernels for devices that are not here: which ones a run asks for, and what its compiler makes of one.

A program is a kernel's function with the types and alignment of its arguments, its constants, and its options. It is asked for without
being compiled, so that uses that share a program cost nothing, and what became of it can be kept by the text that it is made of.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import resource
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import triton
from cross_descriptors import strays
from cross_pool import Lost, Pool
from pagoda.hal.info import DeviceInfo
from pagoda.ops.triton.absent import Compiled, standing_in
from triton import knobs
from triton.runtime.jit import JITFunction

MATRIX = re.compile(r"wgmma\.mma_async|tcgen05\.mma|mma\.sync|v_mfma_\w+|v_wmma_\w+")
NARROW_DOT = re.compile(r"tt\.dot.*tensor<[0-9x]+x(?:f16|bf16|f8\w+)>")


class Program(NamedTuple):
    """What Triton needs to compile one: the module and name of its function, and the rest as Triton writes it down."""

    module: str
    name: str
    rest: str

    @property
    def function(self) -> JITFunction[Any]:
        found = getattr(import_module(self.module), self.name)
        assert isinstance(found, JITFunction)
        return found

    def key(self, target: str) -> str:
        """Says all that the result depends on, but not where in a file a function stands."""
        rest = {name: value for name, value in json.loads(self.rest).items() if name != "key"}
        rest["options"] = {name: value for name, value in rest["options"].items() if name != "extern_libs"}
        text = json.dumps([triton.__version__, *_tools(target), target, _texts(self.function), rest], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass
class Record:
    """What the compiler made of a program.

    Attributes:
        shared: bytes of shared memory. matrix: its matrix instructions. dots, narrow: it multiplies; numbers of 8 or 16 bits.
        stack: bytes of memory that a thread has for what its registers do not hold. spilled: those that registers were put into.
        strays: addresses of its products that look in the wrong place. seconds: of the compiler. error: why there is none.
    """

    shared: int = 0
    matrix: list[str] = field(default_factory=list)
    dots: bool = False
    narrow: bool = False
    stack: int = 0
    spilled: int = 0
    strays: list[str] = field(default_factory=list)
    seconds: float = 0.0
    error: str = ""


@cache
def _tools(target: str) -> tuple[str, ...]:
    """What else than Triton makes a record: NVIDIA's assembler where kernels choose it (`ops/triton/assembler.py`), as a run would; and who
    reads the descriptors of sm90."""
    if not target.startswith("sm") or int(target.removeprefix("sm")) >= 100:
        return ()
    readers = (Path(__file__).with_name("cross_descriptors.py").read_text(),) if target == "sm90" else ()
    return (str(knobs.nvidia.ptxas.version), *readers)


@cache
def _texts(function: JITFunction[Any]) -> list[str]:
    """The sources of a function and of those that it calls, and the constants that they name."""
    texts, waiting, seen = [], [function], set()
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        texts.append(one.src)
        for name in sorted(set(one.fn.__code__.co_names)):
            value = one.__globals__.get(name)
            if isinstance(value, JITFunction):
                waiting.append(value)
            elif isinstance(value, triton.language.constexpr):
                texts.append(f"{name} = {value.value}")
    return sorted(texts)


@contextmanager
def asking(info: DeviceInfo, told: Callable[[Program], None]) -> Iterator[None]:
    """Within, kernels run on meta tensors as on the device that `info` describes, and compile nothing: `told` hears what they would."""
    before = knobs.runtime.jit_cache_hook

    def hook(fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        told(Program(fn.jit_function.__module__, fn.jit_function.__name__, compile["specialization_data"]))
        return True

    with standing_in(info):
        knobs.runtime.jit_cache_hook = hook
        try:
            yield
        finally:
            knobs.runtime.jit_cache_hook = before


def compiled(program: Program, info: DeviceInfo) -> Record:
    """What becomes of the program on that device; its files are looked at and not kept."""
    made: list[Compiled] = []
    began, said = _spent(), io.StringIO()
    knobs.compilation.disable_line_info = knobs.nvidia.dump_ptxas_log = True
    with tempfile.TemporaryDirectory() as folder, standing_in(info, made.append), redirect_stdout(said):
        knobs.cache.dir = folder
        try:
            program.function.preload(program.rest)
        except Exception as error:
            return Record(error=f"{type(error).__name__}: {str(error)[-300:]}", seconds=_spent() - began)
        finally:
            program.function.device_caches.clear()  # which keep every text of every program
        record = _looked_at(made[0], said.getvalue())
    record.seconds = round(_spent() - began, 2)
    return record


def _spent() -> float:
    """Seconds of processors that this process and the compilers that it called have had: others may be busy too."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in used)


def _looked_at(one: Compiled, said: str) -> Record:
    ttir = one.files["ttir"].read_text()
    text = one.files["ptx" if "ptx" in one.files else "amdgcn"].read_text()
    counted = _of_ptxas(said) if "cubin" in one.files else _of_amd(text)
    matrix = sorted(set(MATRIX.findall(text)))
    wrong = strays(one.files["cubin"]) if "wgmma.mma_async" in matrix else []
    return Record(one.shared, matrix, "tt.dot" in ttir, bool(NARROW_DOT.search(ttir)), *counted, wrong)


def _of_ptxas(said: str) -> tuple[int, int]:
    told = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores", said)
    assert told, f"ptxas says nothing of registers: {said}"
    return max(int(stack) for stack, _ in told), max(int(spilled) for _, spilled in told)


def _of_amd(text: str) -> tuple[int, int]:
    stack, spilled = (re.search(rf"\.{name}:\s*(\d+)", text) for name in ("private_segment_fixed_size", "vgpr_spill_count"))
    assert stack and spilled, "the compiler says nothing of registers"
    return int(stack[1]), 4 * int(spilled[1])


class Results:
    """What became of programs, by their keys; kept in a file where there is one, so that a later run compiles only what has changed."""

    def __init__(self, file: Path | None = None) -> None:
        self._file, self._known = file, dict[str, Record]()
        for line in file.read_text().splitlines() if file and file.exists() else ():
            row = json.loads(line)
            key = row.pop("key")
            self._known[key] = Record(**row)

    def get(self, key: str) -> Record | None:
        return self._known.get(key)

    def put(self, key: str, record: Record, keep: bool = True) -> None:
        self._known[key] = record
        if self._file and keep:
            with self._file.open("a") as file:
                file.write(json.dumps({"key": key, **asdict(record)}) + "\n")


def of_device(job: tuple[Program, DeviceInfo]) -> Record:
    """`compiled`, of one thing, for processes of their own."""
    return compiled(*job)


Compilers = Pool[tuple[Program, DeviceInfo], Record]


def compile_all(programs: list[Program], info: DeviceInfo, results: Results, compilers: Compilers | None = None) -> dict[Program, Record]:
    """What becomes of each; those that are not known are compiled, here or in processes that are ended where one takes too long."""
    keys = {program: program.key(info.arch) for program in programs}
    missing = {key: program for program, key in keys.items() if results.get(key) is None}
    if compilers is not None:
        for key, record in compilers.results({key: (program, info) for key, program in missing.items()}):
            if isinstance(record, Lost):  # another time it may be quicker
                results.put(key, Record(error=f"the compiler {record}"), keep=False)
            else:
                results.put(key, record)
    else:
        for key, program in missing.items():
            results.put(key, compiled(program, info))
    return {program: results._known[key] for program, key in keys.items()}
