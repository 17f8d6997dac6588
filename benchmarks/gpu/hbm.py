"""How fast a GPU's memory is: by its data sheet, and what a copy reaches here."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from engine.device import Arrival

_SHEETS = {"H100 80GB HBM3": 3.35e12, "H200": 4.8e12}  # bytes a second, by a part of the name
_COPIES = 20


def sheet_bytes_per_s(device: torch.device) -> float | None:
    """None: not a GPU whose data sheet is known here."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((rate for part, rate in _SHEETS.items() if part in name), None)


def copied_bytes_per_s(device: torch.device) -> float:
    """Read and written."""
    source = torch.zeros((1 << 30) if device.type == "cuda" else (1 << 22), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / timed(lambda: target.copy_(source), device, _COPIES)


def timed(work: Callable[[], object], device: torch.device, times: int) -> float:
    """Seconds of one call, behind a first one."""
    work()
    Arrival(device).wait()
    began = time.perf_counter()
    for _ in range(times):
        work()
    Arrival(device).wait()
    return (time.perf_counter() - began) / times
