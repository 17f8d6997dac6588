"""Bytes as people write and read them."""

from __future__ import annotations

import re

from engine.errors import UserError

_UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*", re.IGNORECASE)


def parse_bytes(text: str, field: str) -> int:
    """`4GiB`, `512 MiB`, `1.5g`, `4GB` (powers of 1000), `1048576`. UserError naming `field` for anything else."""
    match = _SIZE.fullmatch(text)
    if match is None:
        raise UserError(
            f"{field} is {text!r}; allowed is a number with KiB, MiB, GiB, TiB, KB, MB, GB, TB or none", field
        )
    number, unit, binary = match.groups()
    decimal = not binary and text.strip().lower().endswith("b")
    return int(float(number) * (1000 if decimal else 1024) ** _UNITS[unit.lower()])


def format_bytes(size: int) -> str:
    """`1.50 GiB`, `12.0 MiB`, `512 B`."""
    if size >= 1 << 30:
        return f"{size / (1 << 30):.2f} GiB"
    if size >= 1 << 20:
        return f"{size / (1 << 20):.1f} MiB"
    return f"{size / (1 << 10):.1f} KiB" if size >= 1 << 10 else f"{size} B"
