"""How much host memory adapters may take. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engine.errors import UserError
from engine.memory.units import format_bytes


class AdapterSize(NamedTuple):
    """Bytes of an adapter as it was read, and of the copy that a slot holds of it."""

    read: int
    slot: int


@dataclass(frozen=True)
class AdapterBudget:
    """Every loaded adapter is kept as it was read; `slots` of them, the largest at worst, are copied into slots,
    `copies` times (experts on the CPU that a GPU reads too have a pinned copy more).

    limit_bytes None: no limit. `element_bytes`: of a number in a slot."""

    limit_bytes: int | None = None
    slots: int = 0
    element_bytes: int = 2
    copies: int = 1

    def needed(self, sizes: Sequence[AdapterSize]) -> int:
        copies = sorted((size.slot for size in sizes), reverse=True)
        return sum(size.read for size in sizes) + self.copies * sum(copies[: self.slots])

    def room(self, held: Sequence[AdapterSize]) -> int | None:
        """Bytes that one more may have as it was read, at most."""
        return None if self.limit_bytes is None else max(self.limit_bytes - self.needed(held), 0)

    def check(self, name: str, held: Sequence[AdapterSize], new: AdapterSize) -> None:
        """UserError if `new` does not fit beside `held`."""
        if self.limit_bytes is None:
            return
        before, after = self.needed(held), self.needed([*held, new])
        if after > self.limit_bytes:
            raise UserError(
                f"adapter {name!r} needs {format_bytes(after - before)}, and {len(held)} loaded ones take "
                f"{format_bytes(before)} of the {format_bytes(self.limit_bytes)} for adapters: unload one, or start "
                "with more --adapter-memory",
                "lora_path",
            )
