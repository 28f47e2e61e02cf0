"""The number formats of ggml: their codes in a GGUF file, elements and bytes of a block."""

from __future__ import annotations

import enum

SUPER = 256
"""Elements of a super-block, the unit of the K and IQ formats."""


class GgmlType(enum.IntEnum):
    """Code of a tensor's format in a GGUF file."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q8_1 = 9
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    Q8_K = 15
    IQ2_XXS = 16
    IQ2_XS = 17
    IQ3_XXS = 18
    IQ1_S = 19
    IQ4_NL = 20
    IQ3_S = 21
    IQ2_S = 22
    IQ4_XS = 23
    I8 = 24
    I16 = 25
    I32 = 26
    I64 = 27
    F64 = 28
    IQ1_M = 29
    BF16 = 30
    TQ1_0 = 34
    TQ2_0 = 35
    MXFP4 = 39
    NVFP4 = 40
    Q1_0 = 41

    @property
    def block(self) -> int:
        """Elements of one block."""
        return BLOCKS[self][0]

    @property
    def bytes(self) -> int:
        """Bytes of one block."""
        return BLOCKS[self][1]

    @property
    def plain(self) -> bool:
        """One element a block: a dtype that torch has too."""
        return self.block == 1

    def row_bytes(self, elements: int) -> int:
        """Bytes of a row of `elements`; ValueError when it is not a whole number of blocks."""
        if elements % self.block:
            raise ValueError(f"a row of {elements} elements is not a multiple of {self.name}'s block of {self.block}")
        return elements // self.block * self.bytes


BLOCKS: dict[GgmlType, tuple[int, int]] = {
    GgmlType.F32: (1, 4),
    GgmlType.F16: (1, 2),
    GgmlType.Q4_0: (32, 18),
    GgmlType.Q4_1: (32, 20),
    GgmlType.Q5_0: (32, 22),
    GgmlType.Q5_1: (32, 24),
    GgmlType.Q8_0: (32, 34),
    GgmlType.Q8_1: (32, 40),
    GgmlType.Q2_K: (SUPER, 84),
    GgmlType.Q3_K: (SUPER, 110),
    GgmlType.Q4_K: (SUPER, 144),
    GgmlType.Q5_K: (SUPER, 176),
    GgmlType.Q6_K: (SUPER, 210),
    GgmlType.Q8_K: (SUPER, 292),
    GgmlType.IQ2_XXS: (SUPER, 66),
    GgmlType.IQ2_XS: (SUPER, 74),
    GgmlType.IQ3_XXS: (SUPER, 98),
    GgmlType.IQ1_S: (SUPER, 50),
    GgmlType.IQ4_NL: (32, 18),
    GgmlType.IQ3_S: (SUPER, 110),
    GgmlType.IQ2_S: (SUPER, 82),
    GgmlType.IQ4_XS: (SUPER, 136),
    GgmlType.I8: (1, 1),
    GgmlType.I16: (1, 2),
    GgmlType.I32: (1, 4),
    GgmlType.I64: (1, 8),
    GgmlType.F64: (1, 8),
    GgmlType.IQ1_M: (SUPER, 56),
    GgmlType.BF16: (1, 2),
    GgmlType.TQ1_0: (SUPER, 54),
    GgmlType.TQ2_0: (SUPER, 66),
    GgmlType.MXFP4: (32, 17),
    GgmlType.NVFP4: (64, 36),
    GgmlType.Q1_0: (128, 18),
}
"""(elements, bytes) of a block."""
