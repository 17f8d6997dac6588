"""Layers of experts on their way to a GPU, from the CPU backend's packed memory into one of two buffers.

    bringing        | layer 0, packed | layer 1, packed | layer 2, packed | ...        a slice of experts after another
    converting         | 0 -> A           | 1 -> B          | 2 -> A          ...
    compute stream        ...               | layer 0 from A | ...  | layer 1 from B | ...

Streams of their own, since converting takes the GPU's processors, for which it may have to wait as long as a kernel of
the compute stream runs, while what is brought takes none: a layer's packed bytes have memory of their own. What else
goes to the GPU for a step (its inputs) or a layer (tables, LoRA; on a third stream) goes there before the layer's
slices: one engine of the GPU copies from the host, in the order in which it is asked.

Who computes takes a layer, begins to fetch the one that comes next, and says when the first has been used. Experts that
the GPU holds anyway (`HotExperts`) are copied there, not from host memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from engine.device import to_device
from engine.experts.capabilities import HotExperts
from engine.experts.gpu.layout import ExpertLayout, Sizes
from engine.experts.gpu.source import PackedLayer, PackedSource
from engine.experts.stream import event_here

SLICE_EXPERTS = 16  # brought and converted at a time: bounds what converting takes


@dataclass
class _Buffer:
    """`layer`: what it holds, or will when `arrived` has passed; free once `used` has. Events, None without a GPU."""

    expert_slots: torch.Tensor  # uint8 [E, bytes of the largest expert]
    place: torch.Tensor  # int32 [E] on the host: expert slot of each expert
    layer: int | None = None
    arrived: Any = None
    used: Any = None


@dataclass
class _Slice:
    packed: torch.Tensor  # uint8
    free: Any  # event


@dataclass(frozen=True)
class _Order:
    """Of a layer some of whose experts the GPU holds."""

    experts: torch.Tensor  # int64 [E], the `cold` ones first
    cold: int
    there: torch.Tensor  # int64 [E] on the GPU: the hot expert slot of each, in that order


class LayerStream:
    """`order`: the layers, each in the buffer of its place's parity, so that neighbours never share one. `plain`: every
    matrix as numbers of `dtype`, whatever it is stored as. `hot`: experts that the
    GPU holds as they would be here. `beside`: called with the buffer's number and the layer before its weights are
    brought, on the stream that converts. For one thread at a time."""

    def __init__(
        self,
        source: PackedSource,
        order: Sequence[int],
        sizes: Sizes,
        dtype: torch.dtype,
        device: torch.device,
        *,
        plain: bool = False,
        hot: HotExperts | None = None,
        beside: Callable[[int, int], None] | None = None,
    ) -> None:
        self._source, self._sizes, self._dtype, self._device = source, sizes, dtype, device
        self._numbers = {layer: number for number, layer in enumerate(order)}
        self._plain = ExpertLayout.of(sizes, ("f32",) * 3, dtype.itemsize) if plain else None
        self._hot = hot
        self._beside = beside
        self._gpu = device.type == "cuda"
        cuda: Any = torch.cuda
        self._side: Any = cuda.Stream(device) if self._gpu else None
        self._bringing: Any = cuda.Stream(device) if self._gpu else None
        small = self._gpu and (hot is not None or beside is not None)
        self._first: Any = cuda.Stream(device) if small else None
        self._buffers: list[_Buffer] = []
        self._slices: list[_Slice] = []
        self._tried: set[tuple[str, ...]] | None = None  # formats of layers that a trial has brought

    @property
    def num_bytes(self) -> int:
        """Bytes on the GPU; 0 before `prepare`."""
        held = [b.expert_slots for b in self._buffers] + [s.packed for s in self._slices]
        return sum(t.numel() for t in held)

    @staticmethod
    def buffer_bytes(sizes: Sizes, expert_bytes: int) -> int:
        """What the two layers and the packed one take at most. `expert_bytes`: of the largest expert."""
        return 3 * sizes.experts * expert_bytes

    def layout(self, layer: int) -> ExpertLayout:
        """How an expert of the layer lies in its slot."""
        return self._plain or self._source[layer].layout(self._dtype.itemsize)

    def number(self, layer: int) -> int:
        """Of the layer's buffer."""
        return self._numbers[layer] % 2

    @torch.inference_mode(False)  # memory that is written to in and out of that mode
    def prepare(self) -> None:
        """Allocate the buffers, unless that is done. Every layer of the order is in the source by now."""
        if self._buffers:
            return
        experts = self._sizes.experts
        size = max(self.layout(layer).num_bytes for layer in self._numbers)
        for _ in range(2):
            expert_slots = torch.empty(experts, size, dtype=torch.uint8, device=self._device)
            # The side stream's first copy waits for what used this memory before.
            place = torch.arange(experts, dtype=torch.int32)
            self._buffers.append(_Buffer(expert_slots, place, used=event_here(self._gpu)))
        most = max(self._source[layer].expert_bytes for layer in self._numbers)
        for first, last in _slices(0, experts):
            packed = torch.empty(most * (last - first), dtype=torch.uint8, device=self._device)
            self._slices.append(_Slice(packed, event_here(self._gpu)))

    def forget(self) -> None:
        """What the buffers hold is out of date."""
        for buffer in self._buffers:
            buffer.layer = None

    @contextmanager
    def trial(self) -> Iterator[None]:
        """While nobody reads what the buffers hold: only the first layer of each kind of formats is brought, for which
        its kernels are compiled."""
        self._tried = set()
        try:
            yield
        finally:
            self._tried = None
            self.forget()

    def follow(self) -> None:
        """Nothing is brought before the current stream has come to here: what a step needs at its begin would wait
        behind whole layers."""
        if self._bringing is not None:
            self._bringing.wait_event(event_here(True))

    def fetch(self, layer: int) -> None:
        """Start copying a layer, unless it is there, behind the last use of its buffer."""
        buffer = self._buffers[self.number(layer)]
        if buffer.layer == layer:
            return
        buffer.layer = layer
        if self._tried is not None:
            formats = tuple(self._source[layer].formats)
            if formats in self._tried:
                return
            self._tried.add(formats)
        if self._side is None:
            self._copy(buffer)
            return
        if buffer.used is not None:
            self._side.wait_event(buffer.used)
        with torch.cuda.stream(self._side):
            self._copy(buffer)
            buffer.arrived = event_here(self._gpu)

    def take(self, layer: int) -> torch.Tensor:
        """The layer's expert slots, uint8 [E, >= bytes of an expert], for the current stream, until `release`."""
        self.fetch(layer)
        buffer = self._buffers[self.number(layer)]
        if self._gpu and buffer.arrived is not None:
            torch.cuda.current_stream(self._device).wait_event(buffer.arrived)
        return buffer.expert_slots

    def place(self, layer: int) -> torch.Tensor:
        """int32 [E] on the host: which of the expert slots each expert of a fetched layer is in."""
        return self._buffers[self.number(layer)].place

    def release(self, layer: int) -> None:
        """What the current stream has been given so far is all that reads the layer."""
        self._buffers[self.number(layer)].used = event_here(self._gpu)

    def copy_seconds(self, layer: int) -> float:
        """How long a layer takes. Nothing may be in flight."""
        self.prepare()
        buffer = self._buffers[self.number(layer)]
        buffer.layer = layer

        def copy() -> None:
            self._copy(buffer)

        return fastest_of_two(copy, self._device)

    def close(self) -> None:
        """Nothing may be in flight."""
        self._buffers.clear()
        self._slices.clear()

    def _copy(self, buffer: _Buffer) -> None:
        """On the current stream, which is not the one that brings."""
        if buffer.layer is None or not self._slices:
            raise RuntimeError("copy before prepare")
        layer, experts = buffer.layer, self._sizes.experts
        with self._sending_first(buffer):
            hot = None if self._hot is None else self._order_of(buffer, self._hot.of(layer))
            if self._beside is not None:
                self._beside(self.number(layer), layer)
        source, layout = self._source[layer], self.layout(layer)
        if hot is not None:
            self._copy_cold(buffer, source, hot)
            return
        for part, (first, last) in zip(self._slices, _slices(0, experts), strict=True):
            self._bring(part, partial(source.bring, first, last, part.packed))
            source.convert(last - first, buffer.expert_slots[first:last], part.packed, self._dtype, layout)
            part.free = event_here(self._gpu)

    @contextmanager
    def _sending_first(self, buffer: _Buffer) -> Iterator[None]:
        """On a stream that waits for nothing but the buffer: what is sent here comes before the layer's slices, and
        these do not wait for the conversion of another layer's."""
        if self._first is None:
            yield
            return
        if buffer.used is not None:
            self._first.wait_event(buffer.used)
        with torch.cuda.stream(self._first):
            yield
            sent = event_here(True)
        self._bringing.wait_event(sent)
        torch.cuda.current_stream(self._device).wait_event(sent)

    def _order_of(self, buffer: _Buffer, slot_of: torch.Tensor) -> _Order:
        """Experts that are in none of the hot expert slots come first, the others behind them."""
        experts = slot_of.argsort(stable=True)
        buffer.place = torch.empty(len(experts), dtype=torch.int32)
        buffer.place[experts] = torch.arange(len(experts), dtype=torch.int32)
        there = to_device(slot_of[experts].tolist(), torch.int64, self._device)
        return _Order(experts, int((slot_of < 0).sum()), there)

    def _copy_cold(self, buffer: _Buffer, source: PackedLayer, order: _Order) -> None:
        for part, (first, last) in zip(self._slices, _slices(0, order.cold), strict=False):
            experts = [(source, int(expert)) for expert in order.experts[first:last]]
            self._bring(part, partial(source.bring_each, experts, part.packed))
            source.convert(last - first, buffer.expert_slots[first:last], part.packed, self._dtype)
            part.free = event_here(self._gpu)
        if self._hot is not None:
            size, hot = source.layout(self._dtype.itemsize).num_bytes, self._hot.expert_slots
            if self._gpu:  # it was made on another stream
                order.there.record_stream(torch.cuda.current_stream(self._device))
            for first, last in _slices(order.cold, len(order.experts)):
                buffer.expert_slots[first:last, :size].copy_(hot[order.there[first:last], :size])

    def _bring(self, part: _Slice, bring: Callable[[], None]) -> None:
        """As soon as the slice is free; the current stream waits for it."""
        if self._bringing is None:
            bring()
            return
        self._bringing.wait_event(part.free)
        with torch.cuda.stream(self._bringing):
            bring()
            arrived = event_here(True)
        torch.cuda.current_stream(self._device).wait_event(arrived)


def _slices(first: int, end: int) -> Iterator[tuple[int, int]]:
    return ((at, min(at + SLICE_EXPERTS, end)) for at in range(first, end, SLICE_EXPERTS))


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
