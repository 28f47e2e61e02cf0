"""Whether matrix products of a compiled program look where they should: what ptxas made of wgmma's descriptors, read from its instructions.

A descriptor says where in shared memory an operand lies: it follows from constants, the thread's number and counters. ptxas 12.8 loses some
while it puts registers into memory, and takes what another value left in their place: products then read anywhere. `strays` follows values
through a program's registers and memory of its own, and finds products whose descriptor follows from an argument or from data.
"""

from __future__ import annotations

import re
import subprocess
from importlib.util import find_spec
from pathlib import Path

INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?);")
REGISTER = re.compile(r"\b(U?R)(\d+|Z)\b(\.64)?")
SLOT = re.compile(r"\[R1(?:\+(0x[0-9a-f]+))?\]")
ARGUMENT = re.compile(r"c\[0x0\]\[(0x[0-9a-f]+|U?R\d+)")
DESCRIPTOR = re.compile(r"gdesc\[UR(\d+)\]")
FIRST_ARGUMENT = 0x210
"""Where arguments begin among a program's constants on sm90."""
NO_RESULT = re.compile(
    "ST|LDGSTS|LDGDEPBAR|BAR|BRA|EXIT|RET|CALL|RED|MEMBAR|FENCE|DEPBAR|WARPSYNC|WARPGROUP|SYNCS|NOP|BSYNC|UTMA|UBLK|PREEXIT|ACQBULK"
)
"""How the names of instructions begin that write no register."""


def strays(cubin: Path) -> list[str]:
    """Addresses of products whose descriptors stray, in hexadecimal."""
    triton = find_spec("triton")
    assert triton and triton.origin, "Triton brings the disassembler"
    asked = [str(Path(triton.origin).parent / "backends/nvidia/bin/nvdisasm"), "-c", str(cubin)]
    return strays_of(subprocess.run(asked, capture_output=True, text=True, check=True).stdout)


def strays_of(text: str) -> list[str]:
    """The same of a program's instructions as nvdisasm writes them."""
    program = [(where, guard, name, operands.strip()) for where, guard, name, operands in INSTRUCTION.findall(text)]
    foreign: set[str] = set()
    found: set[str] = set()
    for _ in range(2):  # once more for what comes around a loop
        for where, guard, name, operands in program:
            if name.startswith(("HGMMA", "QGMMA", "IGMMA")):
                found |= {where} if foreign & _descriptor(operands) else set()
                continue
            written, comes_from_afar = _effect(name, operands, foreign)
            if comes_from_afar:
                foreign |= written
            elif not guard:
                foreign -= written
    return sorted(found, key=lambda where: int(where, 16))


def _descriptor(operands: str) -> set[str]:
    """The registers of a product's descriptors: two for an operand in shared memory, and room for one that is not."""
    match = DESCRIPTOR.search(operands)
    if match is None:
        return set()
    first, in_registers = int(match[1]), len(REGISTER.findall(operands[: match.start()])) > 1
    return {f"UR{first + i}" for i in range(2 if in_registers else 0, 4)}


def _effect(name: str, operands: str, foreign: set[str]) -> tuple[set[str], bool]:
    """What an instruction writes, and whether that follows from arguments or data."""
    parts = [part.strip() for part in operands.split(",")]
    if name.startswith("STL"):
        return _slots(name, parts[0]), bool(_registers(parts[1], _width(name)) & foreign)
    if NO_RESULT.match(name) or not parts[0]:
        return set(), False
    if name.startswith("LOP3") and not REGISTER.search(parts[0]):  # a predicate, too
        parts = parts[1:]
    if not (written := _registers(parts[0], _width(name))):
        return set(), False
    if name.startswith("LDL"):
        return written, bool(_slots(name, operands) & foreign)
    if name.startswith(("LD", "ATOM", "ULDC", "SULD", "TEX")):
        return written, not name.startswith(("LDC", "ULDC")) or _argument(operands)
    sources = {register for part in parts[1:] for register in _registers(part, 1)}
    return written, bool(sources & foreign) or _argument(operands)


def _width(name: str) -> int:
    """Registers that an instruction writes."""
    if ".128" in name:
        return 4
    return 2 if ".64" in name or ".WIDE" in name or (name.startswith("CS2R") and ".32" not in name) else 1


def _registers(part: str, count: int) -> set[str]:
    """Those that an operand names, `count` from each on."""
    return {
        f"{kind}{int(number) + i}"
        for kind, number, wide in REGISTER.findall(part) if number != "Z" for i in range(max(count, 2 if wide else 1))
    }  # fmt: skip


def _slots(name: str, operand: str) -> set[str]:
    match = SLOT.search(operand)
    assert match, f"memory of a thread's own that is not addressed by R1: {name} {operand}"
    first = int(match[1] or "0", 16)
    return {f"[{first + 4 * i:#x}]" for i in range(_width(name))}


def _argument(operands: str) -> bool:
    """Whether one of the program's arguments is among the operands."""
    return any(not place.startswith("0x") or int(place, 16) >= FIRST_ARGUMENT for place in ARGUMENT.findall(operands))
