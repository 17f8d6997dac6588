"""Small arrays between the host and a GPU, in stream order and without waiting; on a CPU, plain tensors."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch


def to_device(values: Sequence[int] | Sequence[float], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[n]. The pinned copy is not reused before the GPU has read it (torch's host allocator sees to that)."""
    made = torch.tensor(values, dtype=dtype)
    return made if device.type == "cpu" else made.pin_memory().to(device, non_blocking=True)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A host copy that is valid once the stream has got here (see `Arrival`)."""
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    return host


class Arrival:
    """The point that the current stream has been given work up to; `wait` returns when it is there."""

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()


class Stopwatch:
    """Times what the current stream is given from here to `stop`; on a CPU, what the caller does."""

    def __init__(self, device: torch.device) -> None:
        cuda: Any = torch.cuda
        self._events = [cuda.Event(enable_timing=True) for _ in range(2)] if device.type == "cuda" else []
        self._seconds = 0.0
        self._began = time.perf_counter()
        if self._events:
            self._events[0].record()

    def stop(self) -> None:
        self._seconds = time.perf_counter() - self._began
        if self._events:
            self._events[1].record()

    @property
    def ended(self) -> bool:
        return not self._events or bool(self._events[1].query())

    @property
    def seconds(self) -> float:
        """Waits for the stream to get to `stop`."""
        if not self._events:
            return self._seconds
        self._events[1].synchronize()
        return float(self._events[0].elapsed_time(self._events[1])) / 1e3
