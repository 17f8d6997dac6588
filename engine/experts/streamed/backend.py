"""Long prefill chunks on the GPU, a layer's experts streamed there from the CPU backend's memory; those that the
backend within has on the GPU are copied there.

A step is streamed if it has at least `threshold` rows and is not captured; all others go to the backend within. The
threshold is measured by `measure`: the CPU's time for growing chunks against the time of one layer's copy.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager
from dataclasses import replace
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
from engine.experts.gpu.compute import GpuCompute
from engine.experts.gpu.layout import Sizes
from engine.experts.gpu.parts import GpuParts
from engine.experts.stream import on_stream
from engine.experts.streamed.layers import fastest_of_two
from engine.experts.streamed.streaming import StreamedPrompts, Streaming
from engine.experts.streamed.threshold import threshold as measured_threshold
from engine.lora.adapter import ExpertLora
from engine.weights.store import ExpertStore

_PROBE_ROWS = (64, 256, 1024, 4096)
NEVER = 1 << 30


class StreamedExperts(ExpertBackend):
    """`inner`: the backend that serves every other step; it offers packed weights, or its own GPU parts, which are then
    shared. `threshold`: rows from which a step is streamed (NEVER: none);
    None is measured before the first step or capture. `prompt_lane`: steps of long prompts are of a model of their own,
    whose experts are `prompts`, at the same time as these, of which none is streamed."""

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
        prompt_lane: bool = False,
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
        shared = inner.capability(GpuParts)
        self._keeps_adapters = shared is None  # otherwise `inner` does
        sizes = {"max_rows": max_rows, "max_slots": max_slots, "max_rank": max_rank}
        parts = shared or GpuParts.make(config, needed(inner, PackedWeights), dtype, device, **sizes)
        if shared is not None and prompt_lane:
            parts = replace(parts, compute=GpuCompute(parts.sizes, dtype, device, **sizes))
        self._parts = parts
        self._touched = needed(inner, TouchedExperts)  # which counts in steps that are not streamed
        touched = TouchedExperts.of(config.num_hidden_layers, device) if prompt_lane else self._touched
        # What is hot may change from step to step of the others.
        hot = None if prompt_lane else inner.capability(HotExperts)
        self._streaming = Streaming(
            parts, config.sparse_layers, dtype, device, max_slots=max_slots, touched=touched, hot=hot
        )
        self.prompts = StreamedPrompts(self._streaming, touched, device) if prompt_lane else None
        self._streams = False

    @property
    def offers(self) -> tuple[object, ...]:
        passed = PackedWeights, NativeKernels, ExpertCounters, ExpertPlaces
        inner = (self._inner.capability(kind) for kind in passed)
        own = (self._touched,) if self.prompts is None else (self._touched, self.prompts)
        return *own, *(offered for offered in inner if offered is not None)

    @property
    def num_bytes(self) -> int:
        """Bytes on the GPU, without adapters; the layers' are there once a step has been streamed."""
        return self._streaming.num_bytes

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
            self._parts.adapters.put(slot, layers)
        self._streaming.set_adapter(slot)

    def bind(self, layer: int, buffers: ExpertBuffers) -> ExpertTask:
        return self._inner.bind(layer, buffers)

    def begin_step(self, rows: int, *, lora: bool, eager: bool, slots: Collection[int] | None = None) -> None:
        limit = self.measure() if self.threshold is None else self.threshold
        self._streams = eager and rows >= limit and self.prompts is None
        if self.prompts is not None:
            self.prompts.threshold = limit
        self._inner.begin_step(rows, lora=lora, eager=eager, slots=slots)
        if self._streams:
            self._streaming.begin_step(lora=lora, slots=slots)

    def prefetch(self) -> None:
        if self._streams:
            self._streaming.prefetch()

    def trial(self) -> AbstractContextManager[None]:
        return self._streaming.layers.trial()

    def check(self) -> None:
        self._inner.check()

    def post(self, task: ExpertTask, stream: Any = None) -> None:
        if not self._streams:
            self._inner.post(task, stream)
            return
        with on_stream(stream, self._device):
            self._streaming.run(task)

    def wait(self, task: ExpertTask, stream: Any = None) -> None:
        if not self._streams:
            self._inner.wait(task, stream)

    def close(self) -> None:
        """No step may be in flight."""
        self._streaming.close()
        self._parts.close()
        self._inner.close()

    # ---- the choice

    @torch.inference_mode()
    def measure(self) -> int:
        """Measure both ways on the first layer; the threshold is where they meet. No step may be in flight."""
        layer = self._config.sparse_layers[0]
        self._streaming.prepare()
        streamed_s = self._streaming.layers.copy_seconds(layer)
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
        s = self._parts.sizes
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
