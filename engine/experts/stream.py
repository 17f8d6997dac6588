"""Raw CUDA streams as torch's current one, and events."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def on_stream(stream: int | None, device: torch.device) -> Iterator[None]:
    """Make a raw stream current; None leaves the current one, and so does a device without streams."""
    if stream is None or device.type != "cuda" or stream == torch.cuda.current_stream(device).cuda_stream:
        yield
    else:
        outside = torch.cuda.ExternalStream(stream, device=device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(outside):
            yield


def event_here(gpu: bool) -> Any:
    """Recorded on the current stream; None where there is no GPU."""
    if not gpu:
        return None
    cuda: Any = torch.cuda
    event = cuda.Event()
    event.record()
    return event
