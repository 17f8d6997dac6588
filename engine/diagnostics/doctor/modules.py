"""Memory modules as the firmware's tables (SMBIOS, type 17) have them; Linux shows those to root alone.

A structure: `| type u8 | length u8 | handle u16 | fields, length - 4 bytes | strings, each with a 0 | 0 |`, little-
endian; without strings two zero bytes stand there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from engine.diagnostics.doctor.finding import Here

_MODULE, _END = 17, 127
_SIZE, _LARGE_SIZE, _SPEED, _CONFIGURED = 0x0C, 0x1C, 0x15, 0x20  # offsets from the structure's begin
_SEE_LARGE, _UNKNOWN, _IN_KIB = 0x7FFF, 0xFFFF, 0x8000


@dataclass(frozen=True)
class MemoryModule:
    num_bytes: int  # 0: an empty slot
    speed: int  # MT/s as configured; 0: not known


def memory_modules(here: Here) -> list[MemoryModule]:
    """One for each slot; none if the table cannot be read."""
    try:
        table = (here.root / "sys/firmware/dmi/tables/DMI").read_bytes()
    except OSError:
        return []
    return [_module(fields) for kind, fields in _structures(table) if kind == _MODULE]


def _structures(table: bytes) -> Iterator[tuple[int, bytes]]:
    """(type, the structure without its strings); what is cut off ends them."""
    at = 0
    while at + 4 <= len(table):
        kind, length = table[at], table[at + 1]
        end = table.find(b"\0\0", at + length)
        if length < 4 or end < 0:
            return
        yield kind, table[at : at + length]
        if kind == _END:
            return
        at = end + 2


def _module(fields: bytes) -> MemoryModule:
    def number(offset: int, size: int) -> int:
        return int.from_bytes(fields[offset : offset + size], "little") if len(fields) >= offset + size else 0

    size = number(_SIZE, 2)
    if size == _SEE_LARGE:
        num_bytes = (number(_LARGE_SIZE, 4) & 0x7FFFFFFF) << 20
    elif size == _UNKNOWN:
        num_bytes = 0
    else:
        num_bytes = (size & 0x7FFF) << (10 if size & _IN_KIB else 20)
    speeds = [speed for speed in (number(_CONFIGURED, 2), number(_SPEED, 2)) if speed not in (0, _UNKNOWN)]
    return MemoryModule(num_bytes, speeds[0] if speeds else 0)
