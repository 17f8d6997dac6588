"""Long prefill chunks on the GPU, a layer's experts streamed there from the CPU backend's memory.

    side stream     | copy layer 0 -> A | copy layer 1 -> B | copy layer 2 -> A | ...
    compute stream        attention 0 ... | layer 0 from A | attention 1 ... | layer 1 from B | ...

A step is streamed if it has at least `threshold` rows and is not captured; all others go to the backend within. The
threshold is measured by `measure`: the CPU's time for growing chunks against the time of one layer's copy.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch

from engine.errors import EngineError
from engine.experts.base import ExpertBackend, ExpertBuffers, ExpertTask
from engine.experts.capabilities import ExpertCounters, ExpertPlaces, PackedWeights, needed
from engine.experts.gpu.compute import LayerTables, SlotTables
from engine.experts.gpu.layout import Frame, Sizes
from engine.experts.gpu.parts import GpuParts
from engine.experts.stream import on_stream
from engine.experts.streamed.threshold import threshold as crossing
from engine.lora.adapter import ExpertLora
from engine.model.config import ModelConfig
from engine.weights.store import ExpertStore

_SLICE_EXPERTS = 16  # copied and unpacked at a time: bounds the staging memory
_PROBE_ROWS = (64, 256, 1024, 4096)
NEVER = 1 << 30


@dataclass
class _LayerBuffer:
    """One of two buffers for a layer's experts on the GPU."""

    frames: torch.Tensor  # uint8 [E, bytes of the largest frame]
    address: torch.Tensor  # int64 [slots, E]
    lora: dict[int, torch.Tensor]  # by slot: blocks [E, block]
    layer: int | None = None
    arrived: Any = None  # events
    used: Any = None


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
        self._sizes, self._compute = parts.sizes, parts.compute
        self._source, self._adapters = parts.source, parts.adapters
        self._max_slots = max_slots
        self._slots = SlotTables.allocate(len(self._order), max_slots + 1, device)
        experts = torch.arange(self._sizes.experts, dtype=torch.int32, device=device)
        self._place = experts.repeat(max_slots + 1, 1)
        self._buffers: list[_LayerBuffer] = []
        self._staging: torch.Tensor | None = None
        cuda: Any = torch.cuda
        self._side: Any = cuda.Stream(device) if self._gpu else None
        self._streaming = False
        self._lora = True
        self._present: Collection[int] = range(1, max_slots + 1)  # adapter slots of the step

    @property
    def offers(self) -> tuple[object, ...]:
        inner = (self._inner.capability(kind) for kind in (ExpertCounters, ExpertPlaces))
        return tuple(offered for offered in inner if offered is not None)

    @property
    def num_bytes(self) -> int:
        """Bytes on the GPU, without adapters; the layers' are there once a step has been streamed."""
        held = [t for b in self._buffers for t in (b.frames, b.address)]
        held += [] if self._staging is None else [self._staging]
        return sum(t.numel() * t.element_size() for t in held) + self._compute.num_bytes

    @staticmethod
    def buffer_bytes(sizes: Sizes, frame_bytes: int) -> int:
        """What the two layers and the slice of one that is unpacked take at most, without adapters. `frame_bytes`: of
        the largest expert."""
        return (2 * sizes.experts + min(_SLICE_EXPERTS, sizes.experts)) * frame_bytes

    @staticmethod
    def lora_bytes(sizes: Sizes, slots: int, rank: int, element_bytes: int) -> int:
        """What adapters in so many slots take there besides."""
        return 2 * slots * sizes.lora_block(rank) * sizes.experts * element_bytes

    def load_layer(self, layer: int, store: ExpertStore) -> None:
        self._inner.load_layer(layer, store)
        self.add_source(layer)

    def add_source(self, layer: int) -> None:
        """Stream a layer that the backend within has loaded already."""
        self._source.add(layer)

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
            for buffer in self._buffers:
                buffer.layer = None  # adapters may have changed since; a layer is one copy away
            self._fetch(0)

    def check(self) -> None:
        self._inner.check()

    def post(self, task: ExpertTask, stream: Any = None) -> None:
        if not self._streaming:
            self._inner.post(task, stream)
            return
        with on_stream(stream, self._device):
            number = self._numbers[task.layer]
            buffer = self._buffers[number % 2]
            if buffer.layer != task.layer:
                self._fetch(number)
            if self._gpu:
                torch.cuda.current_stream(self._device).wait_event(buffer.arrived)
            if number + 1 < len(self._order):
                self._fetch(number + 1)
            tables = LayerTables(buffer.frames, self._place, buffer.address, self._frame(task.layer))
            b = task.buffers
            self._compute.run(b, tables, self._slots, number, b.out, lora=self._lora)
            buffer.used = self._record()

    def wait(self, task: ExpertTask, stream: Any = None) -> None:
        if not self._streaming:
            self._inner.wait(task, stream)

    def close(self) -> None:
        """No step may be in flight."""
        self._buffers.clear()
        self._source.close()
        self._inner.close()

    # ---- copies

    def _frame(self, layer: int) -> Frame:
        return self._source[layer].frame(self._dtype.itemsize)

    @torch.inference_mode(False)  # memory that is written to in and out of that mode
    def _prepare(self) -> None:
        if self._buffers:
            return
        s, slots = self._sizes, self._max_slots + 1
        for _ in range(2):
            size = max(self._frame(layer).num_bytes for layer in self._order)
            frames = torch.empty(s.experts, size, dtype=torch.uint8, device=self._device)
            address = torch.zeros(slots, s.experts, dtype=torch.int64, device=self._device)
            # The side stream's first copy waits for what used this memory before.
            self._buffers.append(_LayerBuffer(frames, address, {}, used=self._record()))
        most = max(self._source[layer].expert_bytes for layer in self._order)
        self._staging = torch.empty(most * min(_SLICE_EXPERTS, s.experts), dtype=torch.uint8, device=self._device)

    def _fetch(self, number: int) -> None:
        """Start copying the order's layer `number`, behind the last use of its buffer."""
        buffer = self._buffers[number % 2]
        buffer.layer = self._order[number]
        if self._side is None:
            self._copy(buffer)
            return
        if buffer.used is not None:
            self._side.wait_event(buffer.used)
        with torch.cuda.stream(self._side):
            self._copy(buffer)
            buffer.arrived = self._record()

    def _copy(self, buffer: _LayerBuffer) -> None:
        layer = self._order[0] if buffer.layer is None else buffer.layer
        source, experts = self._source[layer], self._sizes.experts
        if self._staging is None:
            raise RuntimeError("copy before prepare")
        for first in range(0, experts, _SLICE_EXPERTS):
            last = min(first + _SLICE_EXPERTS, experts)
            source.copy_experts(first, last, buffer.frames[first:last], self._staging, self._dtype)
        if self._lora:
            self._copy_lora(buffer, layer)

    def _copy_lora(self, buffer: _LayerBuffer, layer: int) -> None:
        """The step's adapters; what another slot held here is stale, but its memory is kept for the next step."""
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

    def _record(self) -> Any:
        if not self._gpu:
            return None
        cuda: Any = torch.cuda
        event = cuda.Event()
        event.record()
        return event

    # ---- the choice

    @torch.inference_mode()
    def measure(self) -> int:
        """Measure both ways on the first layer and take the crossing as threshold. No step may be in flight."""
        layer = self._order[0]
        self._prepare()
        streamed_s = self._seconds(lambda: self._copy_layer(layer))
        cpu_s = {}
        for rows in sorted({min(rows, self._max_rows) for rows in _PROBE_ROWS}):
            cpu_s[rows] = self._cpu_seconds(layer, rows)
            if cpu_s[rows] > streamed_s:
                break
        found = crossing(cpu_s, streamed_s)
        self.threshold = NEVER if found is None else found
        self.measured = {"streamed_s": streamed_s, "cpu_s": cpu_s, "threshold": self.threshold}
        return self.threshold

    def _copy_layer(self, layer: int) -> None:
        buffer = self._buffers[0]
        buffer.layer = layer
        self._copy(buffer)

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

        return self._seconds(run)

    def _seconds(self, run: Any) -> float:
        """The faster of two runs after one to warm up."""
        times = []
        for _ in range(3):
            began = time.perf_counter()
            run()
            if self._gpu:
                torch.cuda.synchronize(self._device)
            times.append(time.perf_counter() - began)
        return min(times[1:])
