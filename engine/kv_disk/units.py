"""What goes to disk and comes from there: blocks of a KV cache, or slots of states, out of the memory of steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import numpy as np
import torch

from engine.kv_disk.files import Bytes


class Units(ABC):
    """`num_bytes` each. Several threads may call everything at once, for different units; a call has done what it is to
    do when it returns. `kept`: of the buffers that `make` gives, so many are made now and used again."""

    def __init__(self, num_bytes: int, make: Callable[[], Bytes], kept: int) -> None:
        self.num_bytes = num_bytes
        self._make, self._kept = make, kept
        self._spare = deque(make() for _ in range(kept))

    @contextmanager
    def buffer(self) -> Iterator[Bytes]:
        """Host memory for one unit, that is the caller's in the block; it may hold anything."""
        try:
            content = self._spare.pop()
        except IndexError:
            content = self._make()
        try:
            yield content
        finally:
            if len(self._spare) < self._kept:
                self._spare.append(content)

    @abstractmethod
    def get(self, unit: int, content: Bytes) -> None:
        """What the unit holds, into a buffer."""

    @abstractmethod
    def put(self, unit: int, content: Bytes) -> None:
        """The other way."""


class HostUnits(Units):
    """`planes`: views [n, units, bytes] of host memory; what a unit holds is plane[:, unit] of all."""

    def __init__(self, planes: Sequence[Bytes]) -> None:
        self._planes = planes
        num_bytes = sum(plane.shape[0] * plane.shape[2] for plane in planes)
        super().__init__(num_bytes, lambda: np.empty(num_bytes, np.uint8), 1)

    def _parts(self, unit: int, content: Bytes) -> Iterator[tuple[Bytes, Bytes]]:
        start = 0
        for plane in self._planes:
            held = plane[:, unit]
            yield held, content[start : start + held.size].reshape(held.shape)
            start += held.size

    def get(self, unit: int, content: Bytes) -> None:
        for held, part in self._parts(unit, content):
            part[:] = held

    def put(self, unit: int, content: Bytes) -> None:
        for held, part in self._parts(unit, content):
            held[:] = part


class DeviceUnits(Units):
    """`planes`: views uint8 [units, bytes] of a device's memory; what a unit holds is plane[unit] of all. Of a GPU
    buffers are pinned, `threads` of them, and copies go over streams of their own, which wait for nothing: who calls
    has seen that what was launched before has run (`engine.device.Arrival`)."""

    def __init__(self, planes: Sequence[torch.Tensor], threads: int) -> None:
        self._planes, self._device = planes, planes[0].device
        ends = np.cumsum([0, *(plane.shape[1] for plane in planes)]).tolist()
        self._parts, num_bytes = [slice(a, b) for a, b in pairwise(ends)], int(ends[-1])
        self._on_gpu = self._device.type == "cuda"

        def make() -> Bytes:
            return np.asarray(torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._on_gpu).numpy())

        super().__init__(num_bytes, make, threads)
        self._streams: deque[torch.cuda.Stream] = deque()
        if self._on_gpu:
            self._streams.extend(torch.cuda.Stream(self._device) for _ in range(threads))  # type: ignore[no-untyped-call]

    def get(self, unit: int, content: Bytes) -> None:
        with self._copying():
            host = torch.from_numpy(content)
            for plane, part in zip(self._planes, self._parts, strict=True):
                host[part].copy_(plane[unit], non_blocking=True)

    def put(self, unit: int, content: Bytes) -> None:
        with self._copying():
            host = torch.from_numpy(content)
            for plane, part in zip(self._planes, self._parts, strict=True):
                plane[unit].copy_(host[part], non_blocking=True)

    @contextmanager
    def _copying(self) -> Iterator[None]:
        """On a stream that nobody else has; returns when it has come to its end."""
        if not self._on_gpu:
            yield
            return
        stream = self._streams.pop()
        try:
            with torch.inference_mode(), torch.cuda.stream(stream):
                yield
            stream.synchronize()
        finally:
            self._streams.append(stream)
