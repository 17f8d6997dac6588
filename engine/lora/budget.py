"""How much memory adapters may take, on the host and in the slots of a GPU's experts. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engine.errors import UserError
from engine.units import format_bytes


class AdapterSize(NamedTuple):
    """Bytes of an adapter as it was read, and of the copy that a slot holds of it; `gpu`: of its experts' part as a GPU
    computes with it, in all layers."""

    read: int
    slot: int
    gpu: int = 0


@dataclass(frozen=True)
class AdapterBudget:
    """Adapters in host memory are kept as they were read; `slots` of all that are known, the largest at worst, are
    copied into slots, `copies` times (experts on the CPU that a GPU reads too have a pinned copy more).

    limit_bytes None: no limit. `element_bytes`: of a number in a slot. `gpu_bytes` of a GPU's memory hold `gpu_share`
    of the experts' part of each adapter in a slot: those of the layers that it holds at once."""

    limit_bytes: int | None = None
    slots: int = 0
    element_bytes: int = 2
    copies: int = 1
    gpu_bytes: int | None = None
    gpu_share: float = 0

    def needed(self, held: Sequence[AdapterSize], known: Sequence[AdapterSize]) -> int:
        """Bytes with `held` in host memory and any of `known` in slots."""
        copies = sorted((size.slot for size in known), reverse=True)
        return sum(size.read for size in held) + self.copies * sum(copies[: self.slots])

    def fits(self, held: Sequence[AdapterSize], known: Sequence[AdapterSize]) -> bool:
        return self.limit_bytes is None or self.needed(held, known) <= self.limit_bytes

    def room(self, kept: Sequence[AdapterSize], others: Sequence[AdapterSize]) -> int | None:
        """Bytes that one more may have as it was read, at most, if all `others` are evicted for it."""
        return None if self.limit_bytes is None else max(self.limit_bytes - self.needed(kept, [*kept, *others]), 0)

    def check(
        self, name: str, kept: Sequence[AdapterSize], others: Sequence[AdapterSize], new: AdapterSize, pinned: bool
    ) -> None:
        """UserError if `new` can never be served beside those that are never evicted (`kept`) and those that are
        evicted when others want their room: if it, or one of the `others`, would not fit beside `kept`; or if it and
        the others' slots would not fit into a GPU's memory."""
        self._check_gpu(name, [*kept, *others], new)
        if self.limit_bytes is None:
            return
        kept, others = ([*kept, new], others) if pinned else (kept, [*others, new])
        largest = sorted(others, key=lambda size: size.read)[-1:]
        most = self.needed([*kept, *largest], [*kept, *others])
        if most > self.limit_bytes:
            raise UserError(
                f"adapter {name!r} ({format_bytes(new.read)}) would never fit: the adapters that stay in host memory "
                f"({len(kept)}), the largest of the others and the copies in slots take {format_bytes(most)} of the "
                f"{format_bytes(self.limit_bytes)} for adapters: pin fewer, unload one, or start with more "
                "--adapter-memory",
                "lora_path",
            )

    def _check_gpu(self, name: str, known: Sequence[AdapterSize], new: AdapterSize) -> None:
        """Slots are filled as requests come: the largest of all that are known may be in them at once."""
        if self.gpu_bytes is None:
            return
        largest = sorted((size.gpu for size in [*known, new]), reverse=True)[: self.slots]
        most = int(self.gpu_share * sum(largest))
        if new.gpu and most > self.gpu_bytes:
            raise UserError(
                f"adapter {name!r} would not fit into the GPU's memory: with it the {len(largest)} largest adapters "
                f"take {format_bytes(most)} in slots (it alone {format_bytes(int(self.gpu_share * new.gpu))}), and the "
                f"plan leaves {format_bytes(self.gpu_bytes)} for them: unload one, or start with a smaller "
                "--kv-cache-tokens or fewer --max-adapter-slots",
                "lora_path",
            )
