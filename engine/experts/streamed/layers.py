"""Layers of experts on their way to a GPU, from the CPU backend's packed memory into one of two buffers.

    side stream     | copy layer 0 -> A | copy layer 1 -> B | copy layer 2 -> A | ...
    compute stream        ...               | layer 0 from A | ...  | layer 1 from B | ...

Who computes takes a layer, begins to fetch the one that comes next, and says when the first has been used.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from engine.experts.gpu.layout import Frame, Sizes
from engine.experts.gpu.source import PackedSource

SLICE_EXPERTS = 16  # copied and unpacked at a time: bounds the staging memory


@dataclass
class _Buffer:
    """`layer`: what it holds, or will when `arrived` has passed; free once `used` has. Events, None without a GPU."""

    frames: torch.Tensor  # uint8 [E, bytes of the largest frame]
    layer: int | None = None
    arrived: Any = None
    used: Any = None


class LayerStream:
    """`order`: the layers, each in the buffer of its place's parity, so that neighbours never share one. `plain`: every
    matrix as numbers of `dtype`, whatever it is stored as. `beside`: called with the buffer's number and the layer when
    its weights have been sent, on the stream that copies. For one thread at a time."""

    def __init__(
        self,
        source: PackedSource,
        order: Sequence[int],
        sizes: Sizes,
        dtype: torch.dtype,
        device: torch.device,
        *,
        plain: bool = False,
        beside: Callable[[int, int], None] | None = None,
    ) -> None:
        self._source, self._sizes, self._dtype, self._device = source, sizes, dtype, device
        self._numbers = {layer: number for number, layer in enumerate(order)}
        self._plain = Frame.of(sizes, ("f32",) * 3, dtype.itemsize) if plain else None
        self._beside = beside
        self._gpu = device.type == "cuda"
        cuda: Any = torch.cuda
        self._side: Any = cuda.Stream(device) if self._gpu else None
        self._buffers: list[_Buffer] = []
        self._staging: torch.Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes on the GPU; 0 before `prepare`."""
        held = [b.frames for b in self._buffers] + ([] if self._staging is None else [self._staging])
        return sum(t.numel() for t in held)

    @staticmethod
    def buffer_bytes(sizes: Sizes, frame_bytes: int) -> int:
        """What the two layers and the slice of one that is unpacked take at most. `frame_bytes`: of the largest
        expert."""
        return (2 * sizes.experts + min(SLICE_EXPERTS, sizes.experts)) * frame_bytes

    def frame(self, layer: int) -> Frame:
        """What a frame of the layer holds."""
        return self._plain or self._source[layer].frame(self._dtype.itemsize)

    def number(self, layer: int) -> int:
        """Of the layer's buffer."""
        return self._numbers[layer] % 2

    @torch.inference_mode(False)  # memory that is written to in and out of that mode
    def prepare(self) -> None:
        """Allocate the buffers, unless that is done. Every layer of the order is in the source by now."""
        if self._buffers:
            return
        experts = self._sizes.experts
        size = max(self.frame(layer).num_bytes for layer in self._numbers)
        for _ in range(2):
            frames = torch.empty(experts, size, dtype=torch.uint8, device=self._device)
            # The side stream's first copy waits for what used this memory before.
            self._buffers.append(_Buffer(frames, used=self._record()))
        most = max(self._source[layer].expert_bytes for layer in self._numbers)
        self._staging = torch.empty(most * min(SLICE_EXPERTS, experts), dtype=torch.uint8, device=self._device)

    def forget(self) -> None:
        """What the buffers hold is out of date."""
        for buffer in self._buffers:
            buffer.layer = None

    def fetch(self, layer: int) -> None:
        """Start copying a layer, unless it is there, behind the last use of its buffer."""
        buffer = self._buffers[self.number(layer)]
        if buffer.layer == layer:
            return
        buffer.layer = layer
        if self._side is None:
            self._copy(buffer)
            return
        if buffer.used is not None:
            self._side.wait_event(buffer.used)
        with torch.cuda.stream(self._side):
            self._copy(buffer)
            buffer.arrived = self._record()

    def take(self, layer: int) -> torch.Tensor:
        """The layer's frames, uint8 [E, >= bytes of a frame], for the current stream, until `release`."""
        self.fetch(layer)
        buffer = self._buffers[self.number(layer)]
        if self._gpu and buffer.arrived is not None:
            torch.cuda.current_stream(self._device).wait_event(buffer.arrived)
        return buffer.frames

    def release(self, layer: int) -> None:
        """What the current stream has been given so far is all that reads the layer."""
        self._buffers[self.number(layer)].used = self._record()

    def copy_seconds(self, layer: int) -> float:
        """How long a layer takes. Nothing may be under way."""
        self.prepare()
        buffer = self._buffers[self.number(layer)]
        buffer.layer = layer

        def copy() -> None:
            self._copy(buffer)

        return fastest_of_two(copy, self._device)

    def close(self) -> None:
        """Nothing may be under way."""
        self._buffers.clear()
        self._staging = None

    def _copy(self, buffer: _Buffer) -> None:
        if self._staging is None or buffer.layer is None:
            raise RuntimeError("copy before prepare")
        source, frame, experts = self._source[buffer.layer], self.frame(buffer.layer), self._sizes.experts
        for first in range(0, experts, SLICE_EXPERTS):
            last = min(first + SLICE_EXPERTS, experts)
            source.copy_experts(first, last, buffer.frames[first:last], self._staging, self._dtype, frame)
        if self._beside is not None:
            self._beside(self.number(buffer.layer), buffer.layer)

    def _record(self) -> Any:
        if not self._gpu:
            return None
        cuda: Any = torch.cuda
        event = cuda.Event()
        event.record()
        return event


def fastest_of_two(run: Callable[[], None], device: torch.device) -> float:
    """Seconds of the faster of two runs after one to warm up."""
    times = []
    for _ in range(3):
        began = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    return min(times[1:])
