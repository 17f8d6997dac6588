"""CPU experts in the order of a CUDA stream: the pool is told and answers through mapped memory.

    stream:  post kernel (inputs -> pinned memory, number n)  ...GPU work...  wait kernel (answer n, results -> GPU)
    pool:                         runs the layer's task, writes the answer

No host function, no host synchronisation: post and wait may be captured and replayed with any row count.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch

from engine.architectures.config import ModelConfig
from engine.errors import EngineError, ExpertBackendError
from engine.experts.base import ExpertBackend, ExpertBuffers, ExpertTask
from engine.experts.capabilities import (
    ExpertCounters,
    ExpertPlaces,
    HotPart,
    NativeKernels,
    NativeTasks,
    PackedWeights,
    PartialTasks,
    TouchedExperts,
    needed,
)
from engine.experts.stream import on_stream
from engine.lora.adapter import ExpertLora
from engine.weights.store import ExpertStore

_CAPACITY = 4096  # (layer, buffer set) pairs


@dataclass
class Channel:
    """A bound (layer, buffer set): its words' number, the pinned twins of its buffers, the pool's task."""

    number: int
    host: ExpertBuffers
    inner: ExpertTask
    counter: torch.Tensor  # int64 [2] on the device: programs that have posted; the answer, for the wait's programs
    chosen: torch.Tensor  # int64 [E] there: the number of the last post in which a row has chosen the expert
    touched: torch.Tensor  # int64 [] there, the layer's: posts add their distinct experts


class CudaBridge(ExpertBackend):
    """`inner` computes and offers native tasks; buffers given to `bind` lie on `device`.

    A pool that does not answer within `timeout_s` releases the stream. What failed, `check` raises: for the step
    that it was seen in and for those that were launched already, whose inputs may stem from it.
    """

    buffers_on = "cuda"
    follows_stream = True

    def __init__(
        self, inner: ExpertBackend, config: ModelConfig, device: torch.device, *, timeout_s: float = 10.0
    ) -> None:
        if timeout_s <= 0:
            raise EngineError(f"timeout_s {timeout_s}: more than 0")
        self.device = device
        self._inner = inner
        self._native = needed(inner, NativeTasks)
        self._config = config
        self._touched = TouchedExperts.of(len(config.layers), device)
        self._timeout_s = timeout_s
        self._on_gpu = device.type == "cuda"
        native: Any = importlib.import_module("native._native")
        words = torch.zeros(3, _CAPACITY, dtype=torch.int64, pin_memory=self._on_gpu)
        self._bridge: Any = native.Bridge(self._native.pool, words.data_ptr(), _CAPACITY)
        self._words = words  # after the bridge, so that they outlive it
        self._host: dict[int, ExpertBuffers] = {}  # by id of the device buffers, which the tasks keep alive
        self._tasks: dict[tuple[int, int], ExpertTask] = {}
        self._launched = self._ended = self._suspect = 0  # steps; those up to _suspect failed
        self._reason = ""
        self._layers: list[str] = []  # by channel

    @property
    def offers(self) -> tuple[object, ...]:
        passed = PackedWeights, NativeKernels, ExpertCounters, ExpertPlaces
        inner = (self._inner.capability(kind) for kind in passed)
        own = PartialTasks(self.post_part, self.wait_part), self._touched
        return *own, *(offered for offered in inner if offered is not None)

    def load_layer(self, layer: int, store: ExpertStore) -> None:
        self._inner.load_layer(layer, store)

    def set_adapter(self, slot: int, layers: dict[int, ExpertLora] | None) -> None:
        self._inner.set_adapter(slot, layers)

    def bind(self, layer: int, buffers: ExpertBuffers) -> ExpertTask:
        """The same task for the same layer and buffers. Not inside a capture: it allocates."""
        key = (layer, id(buffers))
        if key not in self._tasks:
            if buffers.hidden.device.type != self.device.type:
                raise ExpertBackendError(f"the bridge's buffers lie on {self.device}, not {buffers.hidden.device}")
            if id(buffers) not in self._host:
                self._host[id(buffers)] = self._pinned(buffers)
            host = self._host[id(buffers)]
            inner = self._inner.bind(layer, host)
            try:
                number = self._bridge.add(self._native.native_task(inner))
            except ValueError as error:  # a full bridge
                raise ExpertBackendError(f"bridge: {error}") from error
            self._layers.append(f"layer {layer}")
            counter = torch.zeros(2, dtype=torch.int64, device=self.device)
            chosen = torch.zeros(self._config.num_experts, dtype=torch.int64, device=self.device)
            channel = Channel(number, host, inner, counter, chosen, self._touched.counts[layer])
            self._tasks[key] = ExpertTask(layer, buffers, channel)
        return self._tasks[key]

    def _pinned(self, b: ExpertBuffers) -> ExpertBuffers:
        return ExpertBuffers.allocate(b.max_rows, b.ids.shape[1], b.hidden.shape[1], b.hidden.dtype, pin=self._on_gpu)

    def begin_step(self, rows: int, *, lora: bool, eager: bool, slots: Collection[int] | None = None) -> None:
        """Wakes the poller, so that it is there for the step's first post. No rows: a capture or what prepares it."""
        self._launched += rows > 0
        self._bridge.wake()

    def check(self) -> None:
        """Ends the oldest step begun."""
        self._ended = min(self._ended + 1, self._launched)
        failures = self._bridge.take_failures()
        if failures:
            self._suspect = self._launched
            self._reason = "; ".join(f"{self._layers[channel]}: {message}" for channel, _, message in failures)
        if failures or 0 < self._ended <= self._suspect:
            raise ExpertBackendError(f"CPU experts, {self._reason}")

    def post(self, task: ExpertTask, stream: Any = None) -> None:
        self.post_part(task, None, stream)

    def wait(self, task: ExpertTask, stream: Any = None) -> None:
        self.wait_part(task, None, stream)

    def post_part(self, task: ExpertTask, hot: HotPart | None, stream: Any = None) -> None:
        """`post` of the rows' experts that are not the GPU's own."""
        with on_stream(stream, self.device):
            self._launch_post(task, hot)

    def wait_part(self, task: ExpertTask, hot: HotPart | None, stream: Any = None) -> None:
        """`wait`, then add the GPU's own part."""
        with on_stream(stream, self.device):
            self._launch_wait(task, hot)

    def _launch_post(self, task: ExpertTask, hot: HotPart | None) -> None:
        from engine.experts.bridge import kernels as k

        b, c = task.buffers, task.handle
        h, top_k = b.hidden.shape[1], b.ids.shape[1]
        programs = min(k.POST_PROGRAMS, b.max_rows)
        k.post_kernel[(programs,)](
            b.bsz, b.ids, b.weights, b.slots, b.hidden, c.host.bsz, c.host.ids, c.host.weights, c.host.slots,
            c.host.hidden, b.ids if hot is None else hot.place, b.ids if hot is None else hot.uses,
            c.counter, self._words[0, c.number :], c.chosen, c.touched,
            H=h, K=top_k, KP=_power(top_k), E=self._config.num_experts, BLOCK=min(2048, _power(h)), PROGRAMS=programs,
            HYBRID=hot is not None, num_warps=4,
        )  # fmt: skip

    def _launch_wait(self, task: ExpertTask, hot: HotPart | None) -> None:
        from engine.experts.bridge import kernels as k

        b, c = task.buffers, task.handle
        h = b.hidden.shape[1]
        programs = min(k.WAIT_PROGRAMS, b.max_rows)
        k.wait_kernel[(programs,)](
            b.bsz, b.out, c.host.out, b.out if hot is None else hot.extra, c.counter, c.counter[1:],
            self._words[1, c.number :], self._words[2, c.number :], int(self._timeout_s * 1e9),
            H=h, BLOCK=min(2048, _power(h)), PROGRAMS=programs, POSTERS=min(k.POST_PROGRAMS, b.max_rows),
            EXTRA=hot is not None, num_warps=4,
        )  # fmt: skip

    def close(self) -> None:
        """No step may be in flight."""
        self._bridge.close()
        self._tasks.clear()
        self._host.clear()
        self._inner.close()


def _power(value: int) -> int:
    return 1 << max(value - 1, 1).bit_length() if value > 1 else 2
