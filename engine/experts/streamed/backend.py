"""Long prefill chunks on the GPU, a layer's experts streamed there from the CPU backend's memory; those that the
backend within has on the GPU are copied there.

A step is streamed if it has at least `threshold` rows and is not captured; all others go to the backend within. The
threshold is measured by `measure`: the CPU's time for growing chunks against the time of one layer's copy.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch

from engine.architectures.config import ModelConfig
from engine.errors import EngineError
from engine.experts.base import ExpertBackend, ExpertBuffers, ExpertTask
from engine.experts.capabilities import (
    ExpertCounters,
    ExpertPlaces,
    HotExperts,
    NativeKernels,
    PackedWeights,
    TouchedExperts,
    needed,
)
from engine.experts.gpu.compute import LayerTables, SlotTables
from engine.experts.gpu.layout import Sizes
from engine.experts.gpu.parts import GpuParts
from engine.experts.stream import on_stream
from engine.experts.streamed.layers import LayerStream, fastest_of_two
from engine.experts.streamed.threshold import threshold as measured_threshold
from engine.lora.adapter import ExpertLora
from engine.weights.store import ExpertStore

_PROBE_ROWS = (64, 256, 1024, 4096)
NEVER = 1 << 30


@dataclass
class _Beside:
    """Beside one of the two buffers: where its layer's experts are, and their LoRA of the step's adapters."""

    place: torch.Tensor  # int32 [slots, E]
    address: torch.Tensor  # int64 [slots, E]
    lora: dict[int, torch.Tensor]  # by slot: blocks [E, block]


class StreamedExperts(ExpertBackend):
    """`inner`: the backend that serves every other step; it offers packed weights, or its own GPU parts, which are then
    shared. `threshold`: rows from which a step is streamed (NEVER: none);
    None is measured before the first step or capture."""

    buffers_on = "cuda"
    follows_stream = True

    def __init__(
        self,
        inner: ExpertBackend,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        *,
        max_rows: int,
        max_slots: int,
        max_rank: int,
        threshold: int | None = None,
    ) -> None:
        if threshold is not None and threshold < 1:
            raise EngineError(f"prefill_threshold {threshold}: at least 1")
        self._inner = inner
        self.threshold = threshold
        self.measured: dict[str, Any] = {}
        self._config = config
        self._dtype = dtype
        self._device = device
        self._gpu = device.type == "cuda"
        self._max_rows = max_rows
        self._order = config.sparse_layers
        self._numbers = {layer: number for number, layer in enumerate(self._order)}
        shared = inner.capability(GpuParts)
        self._keeps_adapters = shared is None  # otherwise `inner` does
        parts = shared or GpuParts.make(
            config,
            needed(inner, PackedWeights),
            dtype,
            device,
            max_rows=max_rows,
            max_slots=max_slots,
            max_rank=max_rank,
        )
        self._parts = parts
        self._sizes, self._compute = parts.sizes, parts.compute
        self._source, self._adapters = parts.source, parts.adapters
        self._touched = needed(inner, TouchedExperts)  # which counts in steps that are not streamed
        self._max_slots = max_slots
        self._slots = SlotTables.allocate(len(self._order), max_slots + 1, device)
        self._layers = LayerStream(
            self._source, self._order, self._sizes, dtype, device,
            hot=inner.capability(HotExperts), beside=self._copy_beside,
        )  # fmt: skip
        self._buffers: list[_Beside] = []
        self._streaming = False
        self._lora = True
        self._present: Collection[int] = range(1, max_slots + 1)  # adapter slots of the step

    @property
    def offers(self) -> tuple[object, ...]:
        passed = PackedWeights, NativeKernels, ExpertCounters, ExpertPlaces
        inner = (self._inner.capability(kind) for kind in passed)
        return self._touched, *(offered for offered in inner if offered is not None)

    @property
    def num_bytes(self) -> int:
        """Bytes on the GPU, without adapters; the layers' are there once a step has been streamed."""
        tables = sum(t.numel() * t.element_size() for b in self._buffers for t in (b.place, b.address))
        return self._layers.num_bytes + tables + self._compute.num_bytes

    @staticmethod
    def lora_bytes(sizes: Sizes, slots: int, rank: int, element_bytes: int) -> int:
        """What adapters in so many slots take there besides."""
        return 2 * slots * sizes.lora_block(rank) * sizes.experts * element_bytes

    def load_layer(self, layer: int, store: ExpertStore) -> None:
        self._inner.load_layer(layer, store)
        self.add_source(layer, store)

    def add_source(self, layer: int, store: ExpertStore) -> None:
        """Stream a layer that the backend within has loaded of this store already."""
        self._parts.load(layer, store)

    def set_adapter(self, slot: int, layers: dict[int, ExpertLora] | None) -> None:
        self._inner.set_adapter(slot, layers)
        if self._keeps_adapters:
            self._adapters.put(slot, layers)
        adapter = self._adapters.get(slot)
        self._slots.ranks[slot] = adapter.rank if adapter else 0
        for layer, scales in (adapter.scales if adapter else {}).items():
            self._slots.scales[self._numbers[layer], slot] = torch.tensor(scales).to(self._device)
        if self._gpu:
            torch.cuda.current_stream(self._device).synchronize()

    def bind(self, layer: int, buffers: ExpertBuffers) -> ExpertTask:
        return self._inner.bind(layer, buffers)

    def begin_step(self, rows: int, *, lora: bool, eager: bool, slots: Collection[int] | None = None) -> None:
        limit = self.measure() if self.threshold is None else self.threshold
        self._streaming = eager and rows >= limit
        self._lora = lora
        self._present = range(1, self._max_slots + 1) if slots is None else slots
        self._inner.begin_step(rows, lora=lora, eager=eager, slots=slots)
        if self._streaming:
            self._prepare()
            self._layers.forget()  # adapters may have changed since; a layer is one copy away

    def prefetch(self) -> None:
        if self._streaming:
            self._layers.follow()
            self._layers.fetch(self._order[0])

    def check(self) -> None:
        self._inner.check()

    def post(self, task: ExpertTask, stream: Any = None) -> None:
        if not self._streaming:
            self._inner.post(task, stream)
            return
        with on_stream(stream, self._device):
            number = self._numbers[task.layer]
            expert_slots = self._layers.take(task.layer)
            if number + 1 < len(self._order):
                self._layers.fetch(self._order[number + 1])
            beside = self._buffers[self._layers.number(task.layer)]
            layout, touched = self._layers.layout(task.layer), self._touched.counts[task.layer]
            elementwise = self._parts.elementwise[task.layer]
            tables = LayerTables(expert_slots, beside.place, beside.address, layout, touched, elementwise)
            b = task.buffers
            self._compute.run(b, tables, self._slots, number, b.out, lora=self._lora)
            self._layers.release(task.layer)

    def wait(self, task: ExpertTask, stream: Any = None) -> None:
        if not self._streaming:
            self._inner.wait(task, stream)

    def close(self) -> None:
        """No step may be in flight."""
        self._buffers.clear()
        self._layers.close()
        self._parts.close()
        self._inner.close()

    # ---- copies

    @torch.inference_mode(False)  # memory that is written to in and out of that mode
    def _prepare(self) -> None:
        self._layers.prepare()
        slots = self._max_slots + 1
        while len(self._buffers) < 2:
            place = torch.zeros(slots, self._sizes.experts, dtype=torch.int32, device=self._device)
            address = torch.zeros(slots, self._sizes.experts, dtype=torch.int64, device=self._device)
            self._buffers.append(_Beside(place, address, {}))

    def _copy_beside(self, number: int, layer: int) -> None:
        """Of the step's adapters: what another slot held here is stale, but its memory is kept for the next step."""
        buffer = self._buffers[number]
        place = self._layers.place(layer).repeat(self._max_slots + 1, 1)
        buffer.place.copy_(place.pin_memory() if self._gpu else place, non_blocking=True)
        if not self._lora:
            return
        experts = self._sizes.experts
        address = torch.zeros(self._max_slots + 1, experts, dtype=torch.int64)
        for slot in range(1, self._max_slots + 1):
            adapter = self._adapters.get(slot)
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

    # ---- the choice

    @torch.inference_mode()
    def measure(self) -> int:
        """Measure both ways on the first layer; the threshold is where they meet. No step may be in flight."""
        layer = self._order[0]
        self._prepare()
        streamed_s = self._layers.copy_seconds(layer)
        cpu_s = {}
        for rows in sorted({min(rows, self._max_rows) for rows in _PROBE_ROWS}):
            cpu_s[rows] = self._cpu_seconds(layer, rows)
            if cpu_s[rows] > streamed_s:
                break
        found = measured_threshold(cpu_s, streamed_s)
        self.threshold = NEVER if found is None else found
        self.measured = {"streamed_s": streamed_s, "cpu_s": cpu_s, "threshold": self.threshold}
        return self.threshold

    def _cpu_seconds(self, layer: int, rows: int) -> float:
        s = self._sizes
        b = ExpertBuffers.allocate(rows, s.top_k, s.hidden, self._dtype, device=self._device)
        g = torch.Generator().manual_seed(0)
        b.ids.copy_(torch.rand(rows, s.experts, generator=g).topk(s.top_k).indices)
        b.hidden.copy_(torch.randn(rows, s.hidden, generator=g))
        b.bsz.fill_(rows)
        task = self._inner.bind(layer, b)

        def run() -> None:
            self._inner.begin_step(rows, lora=False, eager=True)
            self._inner.post(task)
            self._inner.wait(task)
            if self._gpu:
                torch.cuda.synchronize(self._device)
            self._inner.check()

        return fastest_of_two(run, self._device)
