"""GGML's tensor types: number in a file, name, values per block, bytes per block. Torch-free.

Source: the `ggml_type` enumeration and block structures of the GGUF specification.
"""

from __future__ import annotations

from typing import NamedTuple


class GGMLType(NamedTuple):
    name: str
    block: int  # values
    size: int  # bytes per block


# number: type. Numbers that once had a meaning and lost it are in _WITHDRAWN.
_TYPES: dict[int, GGMLType] = {
    0: GGMLType("F32", 1, 4),
    1: GGMLType("F16", 1, 2),
    2: GGMLType("Q4_0", 32, 18),
    3: GGMLType("Q4_1", 32, 20),
    6: GGMLType("Q5_0", 32, 22),
    7: GGMLType("Q5_1", 32, 24),
    8: GGMLType("Q8_0", 32, 34),
    9: GGMLType("Q8_1", 32, 36),
    10: GGMLType("Q2_K", 256, 84),
    11: GGMLType("Q3_K", 256, 110),
    12: GGMLType("Q4_K", 256, 144),
    13: GGMLType("Q5_K", 256, 176),
    14: GGMLType("Q6_K", 256, 210),
    15: GGMLType("Q8_K", 256, 292),
    16: GGMLType("IQ2_XXS", 256, 66),
    17: GGMLType("IQ2_XS", 256, 74),
    18: GGMLType("IQ3_XXS", 256, 98),
    19: GGMLType("IQ1_S", 256, 50),
    20: GGMLType("IQ4_NL", 32, 18),
    21: GGMLType("IQ3_S", 256, 110),
    22: GGMLType("IQ2_S", 256, 82),
    23: GGMLType("IQ4_XS", 256, 136),
    24: GGMLType("I8", 1, 1),
    25: GGMLType("I16", 1, 2),
    26: GGMLType("I32", 1, 4),
    27: GGMLType("I64", 1, 8),
    28: GGMLType("F64", 1, 8),
    29: GGMLType("IQ1_M", 256, 56),
    30: GGMLType("BF16", 1, 2),
    34: GGMLType("TQ1_0", 256, 54),
    35: GGMLType("TQ2_0", 256, 66),
    39: GGMLType("MXFP4", 32, 17),
    40: GGMLType("NVFP4", 64, 36),
    41: GGMLType("Q1_0", 128, 18),
}
_WITHDRAWN: dict[int, str] = {
    4: "Q4_2",
    5: "Q4_3",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}
_BY_NAME: dict[str, GGMLType] = {kind.name: kind for kind in _TYPES.values()}

READABLE: frozenset[str] = frozenset(_BY_NAME) - {"I8", "I16", "I32", "I64", "F64", "Q8_1", "Q8_K", "Q1_0"}
"""Names of the types that `engine.weights.dequant` can turn into numbers."""


def by_number(number: int) -> GGMLType | None:
    """The type of that number in a GGUF file, None if there is none of known block size."""
    return _TYPES.get(number)


def by_name(name: str) -> GGMLType:
    """KeyError if no type has that name."""
    return _BY_NAME[name]


def describe(number: int) -> str:
    """A type's number as an error message shows it: `12 (Q4_K)`, `4 (Q4_2, withdrawn)`, `99`."""
    if number in _TYPES:
        return f"{number} ({_TYPES[number].name})"
    return f"{number} ({_WITHDRAWN[number]}, withdrawn)" if number in _WITHDRAWN else str(number)
