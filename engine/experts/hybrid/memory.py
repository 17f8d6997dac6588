"""One block of GPU memory, cut into frames of an expert's size.

    | frame: an expert's weights | frame: LoRA of slot 2, many experts | frame: an expert's weights | free | ...

A frame holds either one expert or the LoRA blocks of one adapter slot, so that memory never fragments: a block of rank
16 is 1/34 of a frame at 30B sizes. Everything counts against one budget.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.errors import EngineError


@dataclass
class _SlotMemory:
    block: int  # values of a LoRA block
    frames: list[int] = field(default_factory=list)
    free: list[int] = field(default_factory=list)  # first values of unused blocks


class FrameMemory:
    """`frames` of `frame` values each; places are first values."""

    def __init__(self, frames: int, frame: int) -> None:
        self.frames = frames
        self.frame = frame
        self._free = list(range(frames))[::-1]
        self._slots: dict[int, _SlotMemory] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def lora_frames(self) -> int:
        return sum(len(memory.frames) for memory in self._slots.values())

    def take(self) -> int:
        """A free frame's number."""
        if not self._free:
            raise EngineError("no free frame of GPU memory for an expert")
        return self._free.pop()

    def give(self, frame: int) -> None:
        self._free.append(frame)

    def open_slot(self, slot: int, block: int) -> None:
        """An adapter comes into a slot; its LoRA blocks are of `block` values."""
        self._slots[slot] = _SlotMemory(block)

    def close_slot(self, slot: int) -> None:
        """All of the slot's blocks are free, its frames too. Nothing may read them any more."""
        memory = self._slots.pop(slot, None)
        if memory:
            self._free += memory.frames

    def can_take_lora(self, slot: int) -> bool:
        """Whether there is a block for the slot; never if it is larger than a frame."""
        memory = self._slots[slot]
        return bool(memory.free or (self._free and memory.block <= self.frame))

    def take_lora(self, slot: int) -> int:
        """The first value of a block for the slot."""
        memory = self._slots[slot]
        if not memory.free:
            frame = self.take()
            memory.frames.append(frame)
            memory.free = [frame * self.frame + i * memory.block for i in range(self.frame // memory.block)][::-1]
        return memory.free.pop()

    def give_lora(self, slot: int, at: int) -> None:
        self._slots[slot].free.append(at)
