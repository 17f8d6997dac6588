"""Memory back to the system."""

from __future__ import annotations

import ctypes


def give_back() -> None:
    """Return freed memory to the system (glibc keeps it otherwise)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
