"""CPU experts in the order of a CUDA stream: the pool is told and answers through mapped memory.

    stream:  post kernel (inputs -> pinned memory, number n)  ...GPU work...  wait kernel (answer n, results -> GPU)
    pool:                         runs the layer's task, writes the answer

No host function, no host synchronisation: post and wait may be captured and replayed with any row count.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from engine.errors import ExpertBackendError, UserError
from engine.experts.base import ExpertBackend, ExpertBuffers, ExpertTask
from engine.experts.native import NativeExperts
from engine.lora.adapter import ExpertLora
from engine.model_config import ModelConfig
from engine.weights.store import ExpertStore

_CAPACITY = 4096  # (layer, buffer set) pairs


@dataclass
class Channel:
    """A bound (layer, buffer set): its words' number, the pinned twins of its buffers, the pool's task."""

    number: int
    host: ExpertBuffers
    inner: ExpertTask
    counter: torch.Tensor  # int64 [2] on the device: programs that have posted; the answer, for the wait's programs


@dataclass(frozen=True)
class HotPart:
    """What the GPU computes of a layer itself. `place` int32 [slots, E] (-1: on the CPU), `uses` int32 [E] counts,
    `extra` float32 [M, H] is added to the pool's result."""

    place: torch.Tensor
    uses: torch.Tensor
    extra: torch.Tensor


class CudaBridge(ExpertBackend):
    """`inner` computes; buffers given to `bind` lie on `device`. With device "cpu" the caller plays the stream's part.

    A pool that does not answer within `timeout_s` releases the stream. What failed, `check` raises: for the step
    that it was seen in and for those that were launched already, whose inputs may stem from it.
    """

    buffers_on = "cuda"
    follows_stream = True
    beside_stream = "all"

    def __init__(
        self, inner: NativeExperts, config: ModelConfig, device: torch.device, *, timeout_s: float = 10.0
    ) -> None:
        if timeout_s <= 0:
            raise UserError(f"timeout_s {timeout_s}: more than 0", field="timeout_s")
        self.inner = inner
        self.device = device
        self._config = config
        self._timeout_s = timeout_s
        self._on_gpu = device.type == "cuda"
        native: Any = importlib.import_module("native._native")
        words = torch.zeros(3, _CAPACITY, dtype=torch.int64, pin_memory=self._on_gpu)
        self._bridge: Any = native.Bridge(inner.pool, words.data_ptr(), _CAPACITY)
        self._words = words  # after the bridge, so that they outlive it
        self._host: dict[int, ExpertBuffers] = {}  # by id of the device buffers, which the tasks keep alive
        self._tasks: dict[tuple[int, int], ExpertTask] = {}
        self._launched = self._ended = self._suspect = 0  # steps; those up to _suspect failed
        self._reason = ""
        self._layers: list[str] = []  # by channel

    def load_layer(self, layer: int, store: ExpertStore) -> None:
        self.inner.load_layer(layer, store)

    def set_adapter(self, slot: int, layers: dict[int, ExpertLora] | None) -> None:
        self.inner.set_adapter(slot, layers)

    def bind(self, layer: int, buffers: ExpertBuffers) -> ExpertTask:
        """The same task for the same layer and buffers. Not inside a capture: it allocates."""
        key = (layer, id(buffers))
        if key not in self._tasks:
            if buffers.hidden.device.type != self.device.type:
                raise ExpertBackendError(f"the bridge's buffers lie on {self.device}, not {buffers.hidden.device}")
            if id(buffers) not in self._host:
                self._host[id(buffers)] = self._pinned(buffers)
            host = self._host[id(buffers)]
            inner = self.inner.bind(layer, host)
            try:
                number = self._bridge.add(inner.handle.task)
            except ValueError as error:  # a full bridge
                raise ExpertBackendError(f"bridge: {error}") from error
            self._layers.append(f"layer {layer}")
            counter = torch.zeros(2, dtype=torch.int64, device=self.device)
            self._tasks[key] = ExpertTask(layer, buffers, Channel(number, host, inner, counter))
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
        c: Channel = task.handle
        if self._on_gpu:
            with on_stream(stream, self.device):
                self._launch_post(task, hot)
        else:
            self._copy_in(task.buffers, c.host, hot)
            self._bridge.post(c.number)

    def wait_part(self, task: ExpertTask, hot: HotPart | None, stream: Any = None) -> None:
        """`wait`, then add the GPU's own part."""
        c: Channel = task.handle
        if self._on_gpu:
            with on_stream(stream, self.device):
                self._launch_wait(task, hot)
            return
        good = self._bridge.wait(c.number, self._timeout_s) == 0
        n = int(task.buffers.bsz)
        result = c.host.out[:n] if good else torch.zeros_like(c.host.out[:n])
        task.buffers.out[:n] = result if hot is None else (result.float() + hot.extra[:n])

    def _copy_in(self, b: ExpertBuffers, host: ExpertBuffers, hot: HotPart | None) -> None:
        n = int(b.bsz)
        host.bsz.copy_(b.bsz)
        for name in ("ids", "weights", "slots", "hidden"):
            getattr(host, name)[:n] = getattr(b, name)[:n]
        if hot is not None:
            ids = host.ids[:n]
            hot.uses.add_(torch.bincount(ids[ids >= 0], minlength=hot.uses.numel()))
            ids[(ids >= 0) & (hot.place[host.slots[:n].long()[:, None], ids.clamp(min=0)] >= 0)] = -1

    def _launch_post(self, task: ExpertTask, hot: HotPart | None) -> None:
        from engine.experts import gpu_bridge as k

        b, c = task.buffers, task.handle
        h, top_k = b.hidden.shape[1], b.ids.shape[1]
        programs = min(k.POST_PROGRAMS, b.max_rows)
        k.post_kernel[(programs,)](
            b.bsz, b.ids, b.weights, b.slots, b.hidden, c.host.bsz, c.host.ids, c.host.weights, c.host.slots,
            c.host.hidden, b.ids if hot is None else hot.place, b.ids if hot is None else hot.uses,
            c.counter, self._words[0, c.number :],
            H=h, K=top_k, KP=_power(top_k), E=self._config.num_experts, BLOCK=min(2048, _power(h)), PROGRAMS=programs,
            HYBRID=hot is not None, num_warps=4,
        )  # fmt: skip

    def _launch_wait(self, task: ExpertTask, hot: HotPart | None) -> None:
        from engine.experts import gpu_bridge as k

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
        self.inner.close()


@contextlib.contextmanager
def on_stream(stream: int | None, device: torch.device) -> Iterator[None]:
    """Make a raw stream current; None leaves the current one, and so does a device without streams."""
    if stream is None or device.type != "cuda" or stream == torch.cuda.current_stream(device).cuda_stream:
        yield
    else:
        outside = torch.cuda.ExternalStream(stream, device=device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(outside):
            yield


def _power(value: int) -> int:
    return 1 << max(value - 1, 1).bit_length() if value > 1 else 2
