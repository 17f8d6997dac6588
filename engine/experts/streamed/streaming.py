"""Computes steps on the GPU whose experts are brought there layer by layer, from the CPU backend's memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from engine.errors import ExpertBackendError
from engine.experts.base import ExpertBackend, ExpertBuffers, ExpertTask
from engine.experts.capabilities import HotExperts, TouchedExperts
from engine.experts.gpu.compute import LayerTables, SlotTables
from engine.experts.gpu.parts import GpuParts
from engine.experts.stream import event_here, on_stream
from engine.experts.streamed.layers import LayerStream
from engine.lora.adapter import ExpertLora
from engine.weights.store import ExpertStore

_AHEAD = 2  # layers that may be launched before one has been computed, where a thread of its own launches them


@dataclass
class _Beside:
    """Beside one of the two buffers: where its layer's experts are, and their LoRA of the step's adapters."""

    place: torch.Tensor  # int32 [slots, E]
    address: torch.Tensor  # int64 [slots, E]
    lora: dict[int, torch.Tensor]  # by slot: blocks [E, block]


class Streaming:
    """The layers `order`, with adapters in slots 1 ... max_slots. One stream and thread at a time."""

    def __init__(
        self,
        parts: GpuParts,
        order: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        *,
        max_slots: int,
        touched: TouchedExperts,
        hot: HotExperts | None,
    ) -> None:
        self._parts, self._dtype, self._device = parts, dtype, device
        self._gpu = device.type == "cuda"
        self._order = order
        self._numbers = {layer: number for number, layer in enumerate(order)}
        self._touched = touched
        self._max_slots = max_slots
        self._slots = SlotTables.allocate(len(order), max_slots + 1, device)
        self.layers = LayerStream(parts.source, order, parts.sizes, dtype, device, hot=hot, beside=self._copy_beside)
        self._buffers: list[_Beside] = []
        self._lora = True
        self._present: Collection[int] = range(1, max_slots + 1)  # adapter slots of the step

    @property
    def num_bytes(self) -> int:
        """Bytes on the GPU, without adapters; the layers' are there once a step has begun."""
        tables = sum(t.numel() * t.element_size() for b in self._buffers for t in (b.place, b.address))
        return self.layers.num_bytes + tables + self._parts.compute.num_bytes

    def set_adapter(self, slot: int) -> None:
        """The parts' adapters hold another one there."""
        adapter = self._parts.adapters.get(slot)
        self._slots.ranks[slot] = adapter.rank if adapter else 0
        for layer, scales in (adapter.scales if adapter else {}).items():
            self._slots.scales[self._numbers[layer], slot] = torch.tensor(scales).to(self._device)
        if self._gpu:
            torch.cuda.current_stream(self._device).synchronize()

    def begin_step(self, *, lora: bool, slots: Collection[int] | None) -> None:
        """`slots`: of the step's adapters; None: any."""
        self._lora = lora
        self._present = range(1, self._max_slots + 1) if slots is None else slots
        self.prepare()
        self.layers.forget()  # adapters may have changed since; a layer is one copy away

    def prefetch(self) -> None:
        """The step's inputs are on their way."""
        self.layers.follow()
        self.layers.fetch(self._order[0])

    def run(self, task: ExpertTask) -> None:
        """Computes the task on the current stream."""
        number = self._numbers[task.layer]
        expert_slots = self.layers.take(task.layer)
        if number + 1 < len(self._order):
            self.layers.fetch(self._order[number + 1])
        beside = self._buffers[self.layers.number(task.layer)]
        layout, touched = self.layers.layout(task.layer), self._touched.counts[task.layer]
        elementwise = self._parts.elementwise[task.layer]
        tables = LayerTables(expert_slots, beside.place, beside.address, layout, touched, elementwise)
        b = task.buffers
        self._parts.compute.run(b, tables, self._slots, number, b.out, lora=self._lora)
        self.layers.release(task.layer)

    def close(self) -> None:
        """No step may be in flight."""
        self._buffers.clear()
        self.layers.close()

    @torch.inference_mode(False)  # memory that is written to in and out of that mode
    def prepare(self) -> None:
        """Allocate what is not there yet. The tables come first: what is copied into them waits for the events that the
        layers record here, and else could come before these zeros."""
        slots, experts = self._max_slots + 1, self._parts.sizes.experts
        while len(self._buffers) < 2:
            place = torch.zeros(slots, experts, dtype=torch.int32, device=self._device)
            address = torch.zeros(slots, experts, dtype=torch.int64, device=self._device)
            self._buffers.append(_Beside(place, address, {}))
        self.layers.prepare()

    def _copy_beside(self, number: int, layer: int) -> None:
        """Of the step's adapters: what another slot held here is stale, but its memory is kept for the next step."""
        buffer = self._buffers[number]
        place = self.layers.place(layer).repeat(self._max_slots + 1, 1)
        buffer.place.copy_(place.pin_memory() if self._gpu else place, non_blocking=True)
        if not self._lora:
            return
        experts = self._parts.sizes.experts
        address = torch.zeros(self._max_slots + 1, experts, dtype=torch.int64)
        for slot in range(1, self._max_slots + 1):
            adapter = self._parts.adapters.get(slot)
            if adapter is None or layer not in adapter.blocks:
                buffer.lora.pop(slot, None)
                continue
            if slot not in self._present:
                continue
            blocks = adapter.blocks[layer]
            if slot not in buffer.lora or buffer.lora[slot].shape != blocks.shape:
                with torch.inference_mode(False):
                    buffer.lora[slot] = torch.empty(blocks.shape, dtype=self._dtype, device=self._device)
            there = buffer.lora[slot]
            there.copy_(blocks, non_blocking=True)
            steps = torch.arange(experts) * there.shape[1] * there.element_size()
            address[slot] = (there.data_ptr() + steps) * adapter.present[layer]
        buffer.address.copy_(address.pin_memory() if self._gpu else address, non_blocking=True)


class StreamedPrompts(ExpertBackend):
    """Experts of the lane of long prompts: every step is streamed. Whoever made `streaming` loads layers, sets adapters
    and closes it. `threshold`: rows from which it takes less than the CPU; None before the first step of the others.

    The thread that launches is held back where it is layers ahead of the GPU, so that the GPU's queue does not fill up:
    it would hold up who launches decode steps.
    """

    buffers_on = "cuda"
    follows_stream = True

    def __init__(self, streaming: Streaming, touched: TouchedExperts, device: torch.device) -> None:
        self._streaming, self._touched, self._device = streaming, touched, device
        self.threshold: int | None = None
        self._computed: deque[Any] = deque()  # events behind layers

    @property
    def offers(self) -> tuple[object, ...]:
        return self._touched, self

    def begin_step(self, rows: int, *, lora: bool, eager: bool, slots: Collection[int] | None = None) -> None:
        self._streaming.begin_step(lora=lora, slots=slots)

    def prefetch(self) -> None:
        self._streaming.prefetch()

    def trial(self) -> AbstractContextManager[None]:
        return self._streaming.layers.trial()

    def bind(self, layer: int, buffers: ExpertBuffers) -> ExpertTask:
        return ExpertTask(layer, buffers, None)

    def post(self, task: ExpertTask, stream: Any = None) -> None:
        with on_stream(stream, self._device):
            self._streaming.run(task)
            self._computed.append(event_here(self._device.type == "cuda"))

    def wait(self, task: ExpertTask, stream: Any = None) -> None:
        if len(self._computed) > _AHEAD and (event := self._computed.popleft()) is not None:
            event.synchronize()

    def check(self) -> None:
        """Kernels of a GPU report their faults themselves."""

    def load_layer(self, layer: int, store: ExpertStore) -> None:
        raise ExpertBackendError("experts of long prompts are loaded by the backend of all other steps")

    def set_adapter(self, slot: int, layers: dict[int, ExpertLora] | None) -> None:
        raise ExpertBackendError("experts of long prompts take adapters from the backend of all other steps")

    def close(self) -> None:
        self._computed.clear()
