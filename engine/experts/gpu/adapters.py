"""Adapters' expert LoRA in host memory in the GPU's block layout, and what each slot has where."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch

from engine.errors import AdapterError, ExpertBackendError
from engine.experts.gpu.layout import Sizes, lora_blocks
from engine.lora.adapter import ExpertLora, padded_rank


@dataclass(frozen=True)
class HostAdapter:
    """One slot's adapter. By layer: blocks [E, block] (pinned beside a GPU), present bool [E]."""

    rank: int
    blocks: dict[int, torch.Tensor]
    present: dict[int, torch.Tensor]
    scales: dict[int, tuple[float, float, float]]

    @property
    def block_bytes(self) -> int:
        block = next(iter(self.blocks.values()))
        return block.shape[1] * block.element_size()


class HostAdapters:
    """By slot; set from the loader's thread, read by the step's. `changed` collects slots not yet taken notice of."""

    def __init__(self, sizes: Sizes, dtype: torch.dtype, *, max_slots: int, max_rank: int, pin: bool) -> None:
        self._sizes = sizes
        self._dtype = dtype
        self._max_slots = max_slots
        self._max_rank = padded_rank(max(max_rank, 1))
        self._pin = pin
        self._lock = threading.Lock()
        self._slots: dict[int, HostAdapter] = {}
        self._changed: set[int] = set()

    def put(self, slot: int, layers: dict[int, ExpertLora] | None) -> None:
        if not 1 <= slot <= self._max_slots:
            raise ExpertBackendError(f"slot {slot}: allowed are 1 to {self._max_slots}")
        made = self._make(layers) if layers else None
        with self._lock:
            self._changed.add(slot)
            self._slots.pop(slot, None)
            if made is not None:
                self._slots[slot] = made

    def _make(self, layers: dict[int, ExpertLora]) -> HostAdapter:
        largest = max(lora.rank for lora in layers.values())
        rank = padded_rank(largest)
        if rank > self._max_rank:
            raise AdapterError(f"expert LoRA of rank {largest} is over --max-adapter-rank {self._max_rank}")
        made = HostAdapter(rank, {}, {}, {})
        for layer, lora in layers.items():
            blocks, made.present[layer] = lora_blocks(lora, self._sizes, self._dtype, rank)
            made.blocks[layer] = blocks.pin_memory() if self._pin else blocks
            made.scales[layer] = (lora.gate_scale, lora.up_scale, lora.down_scale)
        return made

    def get(self, slot: int) -> HostAdapter | None:
        with self._lock:
            return self._slots.get(slot)

    def take_changed(self) -> set[int]:
        with self._lock:
            changed, self._changed = self._changed, set()
            return changed
