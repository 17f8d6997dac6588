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

from engine.errors import UserError
from engine.experts.base import ExpertBackend, ExpertBuffers, ExpertTask
from engine.experts.cuda_bridge import CudaBridge, on_stream
from engine.experts.gpu_adapters import HostAdapters
from engine.experts.gpu_compute import GpuCompute, LayerTables, SlotTables
from engine.experts.gpu_layout import Sizes
from engine.experts.gpu_source import PackedSource
from engine.experts.hybrid import HybridExperts
from engine.experts.streamed_threshold import threshold as crossing
from engine.lora.adapter import ExpertLora
from engine.model_config import ModelConfig
from engine.weights.store import ExpertStore

_SLICE_EXPERTS = 16  # copied and unpacked at a time: bounds the staging memory
_PROBE_ROWS = (64, 256, 1024)
NEVER = 1 << 30


@dataclass
class _Half:
    """One of two places for a layer on the GPU."""

    frames: torch.Tensor  # [E, frame]
    address: torch.Tensor  # int64 [slots, E]
    lora: dict[int, torch.Tensor]  # by slot: blocks [E, block]
    layer: int | None = None
    lora_here: bool = False
    arrived: Any = None  # events
    used: Any = None


class StreamedExperts(ExpertBackend):
    """`inner`: the backend that serves every other step. `threshold`: rows from which a step is streamed (NEVER: none);
    None is measured before the first step or capture."""

    buffers_on = "cuda"
    follows_stream = True

    def __init__(
        self,
        inner: CudaBridge | HybridExperts,
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
            raise UserError(f"prefill_threshold {threshold}: at least 1", field="rules")
        self.inner = inner
        self.beside_stream = inner.beside_stream  # of steps that are not streamed
        self.threshold = threshold
        self.measured: dict[str, Any] = {}
        self._config = config
        self._dtype = dtype
        self._device = device
        self._gpu = device.type == "cuda"
        self._max_rows = max_rows
        self._order = config.sparse_layers
        self._numbers = {layer: number for number, layer in enumerate(self._order)}
        if isinstance(inner, HybridExperts):
            self._sizes, self._compute = inner.sizes, inner.compute
            self._source, self._adapters = inner.source, inner.adapters
        else:
            self._sizes = Sizes.of(config)
            self._compute = GpuCompute(
                self._sizes, dtype, device, max_rows=max_rows, max_rank=max_rank, max_slots=max_slots
            )
            self._source = PackedSource(inner.inner, self._sizes, device)
            self._adapters = HostAdapters(self._sizes, dtype, max_slots=max_slots, max_rank=max_rank, pin=self._gpu)
        self._max_slots = max_slots
        self._slots = SlotTables.allocate(len(self._order), max_slots + 1, device)
        experts = torch.arange(self._sizes.experts, dtype=torch.int32, device=device)
        self._place = experts.repeat(max_slots + 1, 1)
        self._halves: list[_Half] = []
        self._staging: torch.Tensor | None = None
        cuda: Any = torch.cuda
        self._side: Any = cuda.Stream(device) if self._gpu else None
        self._streaming = False
        self._lora = True
        self._present: Collection[int] = range(1, max_slots + 1)  # adapter slots of the step

    @property
    def num_bytes(self) -> int:
        """Bytes on the GPU once a step has been streamed, without adapters."""
        frames = 2 * self._sizes.experts * self._sizes.frame * self._dtype.itemsize
        return frames + frames // self._sizes.experts * _SLICE_EXPERTS + self._compute.num_bytes

    def load_layer(self, layer: int, store: ExpertStore) -> None:
        self.inner.load_layer(layer, store)
        self.add_source(layer)

    def add_source(self, layer: int) -> None:
        """Stream a layer that the backend within has loaded already."""
        self._source.add(layer)

    def set_adapter(self, slot: int, layers: dict[int, ExpertLora] | None) -> None:
        self.inner.set_adapter(slot, layers)
        if isinstance(self.inner, CudaBridge):
            self._adapters.put(slot, layers)
        adapter = self._adapters.get(slot)
        self._slots.ranks[slot] = adapter.rank if adapter else 0
        for layer, scales in (adapter.scales if adapter else {}).items():
            self._slots.scales[self._numbers[layer], slot] = torch.tensor(scales).to(self._device)
        if self._gpu:
            torch.cuda.current_stream(self._device).synchronize()

    def bind(self, layer: int, buffers: ExpertBuffers) -> ExpertTask:
        return self.inner.bind(layer, buffers)

    def begin_step(self, rows: int, *, lora: bool, eager: bool, slots: Collection[int] | None = None) -> None:
        limit = self.measure() if self.threshold is None else self.threshold
        self._streaming = eager and rows >= limit
        self._lora = lora
        self._present = range(1, self._max_slots + 1) if slots is None else slots
        self.inner.begin_step(rows, lora=lora, eager=eager, slots=slots)
        if self._streaming:
            self._prepare()
            for half in self._halves:
                half.layer = None  # adapters may have changed since; a layer's place is one copy away
            self._fetch(0)

    def check(self) -> None:
        self.inner.check()

    def post(self, task: ExpertTask, stream: Any = None) -> None:
        if not self._streaming:
            self.inner.post(task, stream)
            return
        with on_stream(stream, self._device):
            number = self._numbers[task.layer]
            half = self._halves[number % 2]
            if half.layer != task.layer:
                self._fetch(number)
            if self._gpu:
                torch.cuda.current_stream(self._device).wait_event(half.arrived)
            if number + 1 < len(self._order):
                self._fetch(number + 1)
            tables = LayerTables(half.frames, self._place, half.address)
            b = task.buffers
            self._compute.run(b, tables, self._slots, number, b.out, lora=self._lora)
            half.used = self._record()

    def wait(self, task: ExpertTask, stream: Any = None) -> None:
        if not self._streaming:
            self.inner.wait(task, stream)

    def close(self) -> None:
        """No step may be in flight."""
        self._halves.clear()
        self._source.close()
        self.inner.close()

    # ---- copies

    @torch.inference_mode(False)  # memory that is written to in and out of that mode
    def _prepare(self) -> None:
        if self._halves:
            return
        s, slots = self._sizes, self._max_slots + 1
        for _ in range(2):
            frames = torch.empty(s.experts, s.frame, dtype=self._dtype, device=self._device)
            address = torch.zeros(slots, s.experts, dtype=torch.int64, device=self._device)
            # The side stream's first copy waits for what used this memory before.
            self._halves.append(_Half(frames, address, {}, used=self._record()))
        most = max(self._source[layer].expert_bytes for layer in self._order)
        self._staging = torch.empty(most * min(_SLICE_EXPERTS, s.experts), dtype=torch.uint8, device=self._device)

    def _fetch(self, number: int) -> None:
        """Start copying the order's layer `number`, behind the last use of its half."""
        half = self._halves[number % 2]
        half.layer = self._order[number]
        if self._side is None:
            self._copy(half)
            return
        if half.used is not None:
            self._side.wait_event(half.used)
        with torch.cuda.stream(self._side):
            self._copy(half)
            half.arrived = self._record()

    def _copy(self, half: _Half) -> None:
        layer = self._order[0] if half.layer is None else half.layer
        source, experts = self._source[layer], self._sizes.experts
        if self._staging is None:
            raise RuntimeError("copy before prepare")
        for first in range(0, experts, _SLICE_EXPERTS):
            last = min(first + _SLICE_EXPERTS, experts)
            source.copy_experts(first, last, half.frames[first:last], self._staging)
        if self._lora:
            self._copy_lora(half, layer)

    def _copy_lora(self, half: _Half, layer: int) -> None:
        """The step's adapters; what another slot held here is stale, but its memory is kept for the next step."""
        experts = self._sizes.experts
        address = torch.zeros(self._max_slots + 1, experts, dtype=torch.int64)
        for slot in range(1, self._max_slots + 1):
            adapter = self._adapters.get(slot)
            if adapter is None or layer not in adapter.blocks:
                half.lora.pop(slot, None)
                continue
            if slot not in self._present:
                continue
            blocks = adapter.blocks[layer]
            if slot not in half.lora or half.lora[slot].shape != blocks.shape:
                with torch.inference_mode(False):
                    half.lora[slot] = torch.empty(blocks.shape, dtype=self._dtype, device=self._device)
            there = half.lora[slot]
            there.copy_(blocks, non_blocking=True)
            steps = torch.arange(experts) * there.shape[1] * there.element_size()
            address[slot] = (there.data_ptr() + steps) * adapter.present[layer]
        half.address.copy_(address.pin_memory() if self._gpu else address, non_blocking=True)

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
        for rows in [r for r in _PROBE_ROWS if r < self._max_rows] + [self._max_rows]:
            cpu_s[rows] = self._cpu_seconds(layer, rows)
            if cpu_s[rows] > streamed_s:
                break
        found = crossing(cpu_s, streamed_s)
        self.threshold = NEVER if found is None else found
        self.measured = {"streamed_s": streamed_s, "cpu_s": cpu_s, "threshold": self.threshold}
        return self.threshold

    def _copy_layer(self, layer: int) -> None:
        half = self._halves[0]
        half.layer = layer
        self._copy(half)

    def _cpu_seconds(self, layer: int, rows: int) -> float:
        s = self._sizes
        b = ExpertBuffers.allocate(rows, s.top_k, s.hidden, self._dtype, device=self._device)
        g = torch.Generator().manual_seed(0)
        b.ids.copy_(torch.rand(rows, s.experts, generator=g).topk(s.top_k).indices)
        b.hidden.copy_(torch.randn(rows, s.hidden, generator=g))
        b.bsz.fill_(rows)
        task = self.inner.bind(layer, b)

        def run() -> None:
            self.inner.begin_step(rows, lora=False, eager=True)
            self.inner.post(task)
            self.inner.wait(task)
            if self._gpu:
                torch.cuda.synchronize(self._device)
            self.inner.check()

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
