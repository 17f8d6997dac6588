"""Small arrays between the host and a GPU, in stream order and without waiting; on a CPU, plain tensors. Branches of
graphs."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def to_device(
    values: Sequence[int] | Sequence[float] | np.ndarray[Any, Any], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """[n], or an array's shape; on a CPU it may share the array's memory. The pinned copy is not reused before the GPU
    has read it (torch's host allocator sees to that)."""
    made = torch.as_tensor(values, dtype=dtype)
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

    @property
    def here(self) -> bool:
        """Whether `wait` would return at once."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def hold_stream(self) -> None:
        """What the current stream is given from now on comes after it."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)


@functools.cache
def _branch(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]


@contextmanager
def beside(device: torch.device) -> Iterator[None]:
    """While a graph is captured: on a branch of it, beside what comes next, until `rejoin`. Elsewhere in turn."""
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        yield
        return
    branch = _branch(device)
    branch.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(branch):
        yield


def rejoin(device: torch.device) -> None:
    """What comes next follows both."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        torch.cuda.current_stream(device).wait_stream(_branch(device))
