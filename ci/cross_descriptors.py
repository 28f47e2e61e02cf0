"""Whether matrix products of a compiled program look where they should: what ptxas made of wgmma's descriptors, read from its instructions.

A descriptor says where in shared memory an operand lies: it follows from constants, the thread's number and counters. ptxas 12.8 loses some
while it puts registers into memory, and takes what another value left in their place: products then read anywhere. `strays` follows values
through a program's registers and memory of its own, along its branches, and finds products whose descriptor follows from an argument or
from data on some way there.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?);")
LABEL = re.compile(r"\s*(\.L\w*):")
TARGET = re.compile(r"`\((\.L\w*)\)")
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


class Instruction(NamedTuple):
    """One: where it is, the predicate that it depends on or nothing, its name and what stands behind."""

    where: str
    guard: str
    name: str
    operands: str


def strays_of(text: str) -> list[str]:
    """The same of a program's instructions as nvdisasm writes them."""
    program, labels = _parsed(text)
    ways, before = _ways(program, labels), [set[str]() for _ in program]
    found, waiting, seen = set[str](), [0] if program else [], set[int]()
    while waiting:
        at = waiting.pop()
        seen.add(at)
        one, foreign = program[at], set(before[at])
        if one.name.startswith(("HGMMA", "QGMMA", "IGMMA")):
            found |= {one.where} if foreign & _descriptor(one.operands) else set()
        else:
            written, from_afar = _effect(one.name, one.operands, foreign)
            if not one.guard:
                foreign -= written
            foreign |= from_afar
        if one.name.startswith("BSSY"):
            foreign = {known for known in foreign if not known.startswith(f"{_barrier(one)} ")}
            foreign |= {f"{_barrier(one)} {label}" for label in TARGET.findall(one.operands)}
        # Threads that part meet again where the last BSSY of their barrier says: what is known of barriers goes along with the rest.
        meets = {labels[known.split()[1]] for known in foreign if known.startswith(f"{_barrier(one)} ")} if one.name == "BSYNC" else set()
        for following in ways[at] | {place for place in meets if place < len(program)}:
            if following not in seen or not foreign <= before[following]:
                before[following] |= foreign
                waiting.append(following)
    return sorted(found, key=lambda where: int(where, 16))


def _parsed(text: str) -> tuple[list[Instruction], dict[str, int]]:
    """Instructions, and which of them the labels stand before."""
    program, labels = list[Instruction](), dict[str, int]()
    for line in text.splitlines():
        if match := LABEL.match(line):
            labels[match[1]] = len(program)
        elif match := INSTRUCTION.search(line):
            program.append(Instruction(match[1], match[2] or "", match[3], match[4].strip()))
    return program, labels


def _ways(program: list[Instruction], labels: dict[str, int]) -> list[set[int]]:
    """The instructions that may follow each, but for where threads meet again."""
    calls = {at + 1 for at, one in enumerate(program) if one.name.startswith("CALL")}

    def following(at: int, one: Instruction) -> Iterator[int]:
        targets = [labels[name] for name in TARGET.findall(one.operands)]
        if one.name.startswith(("BRA", "CALL", "JMP")):
            yield from targets
        elif one.name.startswith(("BRX", "JMX")):  # anywhere
            yield from labels.values()
        elif one.name.startswith("RET"):
            yield from calls
        always = not one.guard and (TARGET.fullmatch(one.operands) is not None or one.name.startswith(("EXIT", "RET", "BRX", "JMX")))
        if not (always and one.name.startswith(("BRA", "JMP", "EXIT", "RET", "BRX", "JMX"))):
            yield at + 1

    return [{way for way in following(at, one) if way < len(program)} for at, one in enumerate(program)]


def _barrier(one: Instruction) -> str:
    return one.operands.split(",")[0]


def _descriptor(operands: str) -> set[str]:
    """The registers of a product's descriptors: two for an operand in shared memory, and room for one that is not."""
    match = DESCRIPTOR.search(operands)
    if match is None:
        return set()
    first, in_registers = int(match[1]), len(REGISTER.findall(operands[: match.start()])) > 1
    return {f"UR{first + i}" for i in range(2 if in_registers else 0, 4)}


def _effect(name: str, operands: str, foreign: set[str]) -> tuple[set[str], set[str]]:
    """What an instruction writes, and what of it follows from arguments or data. Two numbers that go to a thread's own memory side by side
    stay two."""
    parts = [part.strip() for part in operands.split(",")]
    if name.startswith("STL"):
        return _moved(_slots(name, parts[0]), _registers(parts[1], _width(name)), foreign)
    if NO_RESULT.match(name) or not parts[0]:
        return set(), set()
    if name.startswith("LOP3") and not REGISTER.search(parts[0]):  # a predicate, too
        parts = parts[1:]
    written = _registers(parts[0], _width(name))
    if name.startswith("LDL"):
        return _moved(written, _slots(name, operands), foreign)
    if name.startswith(("LD", "ATOM", "ULDC", "SULD", "TEX")):
        far = not name.startswith(("LDC", "ULDC")) or _argument(operands)
    else:
        far = _argument(operands) or any(register in foreign for part in parts[1:] for register in _registers(part, 1))
    return set(written), set(written) if far else set()


def _moved(to: list[str], source: list[str], foreign: set[str]) -> tuple[set[str], set[str]]:
    """One after the other; zeros come from nowhere."""
    return set(to), {place for place, number in zip(to, source or [""] * len(to), strict=True) if number in foreign}


def _width(name: str) -> int:
    """Registers that an instruction writes."""
    if ".128" in name:
        return 4
    return 2 if ".64" in name or ".WIDE" in name or (name.startswith("CS2R") and ".32" not in name) else 1


def _registers(part: str, count: int) -> list[str]:
    """Those that an operand names, `count` from each on."""
    return [
        f"{kind}{int(number) + i}"
        for kind, number, wide in REGISTER.findall(part) if number != "Z" for i in range(max(count, 2 if wide else 1))
    ]  # fmt: skip


def _slots(name: str, operand: str) -> list[str]:
    match = SLOT.search(operand)
    assert match, f"memory of a thread's own that is not addressed by R1: {name} {operand}"
    first = int(match[1] or "0", 16)
    return [f"[{first + 4 * i:#x}]" for i in range(_width(name))]


def _argument(operands: str) -> bool:
    """Whether one of the program's arguments is among the operands."""
    return any(not place.startswith("0x") or int(place, 16) >= FIRST_ARGUMENT for place in ARGUMENT.findall(operands))
