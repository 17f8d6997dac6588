"""One block of GPU memory, cut into expert slots of an expert's size.

    | an expert's weights | LoRA of adapter slot 2, many experts | an expert's weights | free | ...

An expert slot holds either one expert or the LoRA blocks of one adapter slot, so that memory never fragments: a block
of rank 16 is 1/34 of an expert slot at 30B sizes. Everything counts against one budget.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.errors import EngineError


@dataclass
class _SlotMemory:
    block: int  # values of a LoRA block
    expert_slots: list[int] = field(default_factory=list)
    free: list[int] = field(default_factory=list)  # first values of unused blocks


class ExpertSlots:
    """`expert_slots` of `expert_slot` values each; places are first values."""

    def __init__(self, expert_slots: int, expert_slot: int) -> None:
        self.expert_slots = expert_slots
        self.expert_slot = expert_slot
        self._free = list(range(expert_slots))[::-1]
        self._slots: dict[int, _SlotMemory] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def lora_expert_slots(self) -> int:
        return sum(len(memory.expert_slots) for memory in self._slots.values())

    def take(self) -> int:
        """A free expert slot's number."""
        if not self._free:
            raise EngineError("no free expert slot of GPU memory for an expert")
        return self._free.pop()

    def give(self, expert_slot: int) -> None:
        self._free.append(expert_slot)

    def open_slot(self, slot: int, block: int) -> None:
        """An adapter comes into a slot; its LoRA blocks are of `block` values."""
        self._slots[slot] = _SlotMemory(block)

    def close_slot(self, slot: int) -> None:
        """All of the slot's blocks are free, its expert slots too. Nothing may read them any more."""
        memory = self._slots.pop(slot, None)
        if memory:
            self._free += memory.expert_slots

    def can_take_lora(self, slot: int) -> bool:
        """Whether there is a block for the slot; never if it is larger than an expert slot."""
        memory = self._slots[slot]
        return bool(memory.free or (self._free and memory.block <= self.expert_slot))

    def take_lora(self, slot: int) -> int:
        """The first value of a block for the slot."""
        memory = self._slots[slot]
        if not memory.free:
            expert_slot = self.take()
            memory.expert_slots.append(expert_slot)
            memory.free = [
                expert_slot * self.expert_slot + i * memory.block for i in range(self.expert_slot // memory.block)
            ][::-1]
        return memory.free.pop()

    def give_lora(self, slot: int, at: int) -> None:
        self._slots[slot].free.append(at)
