"""Memory that blocks and snapshots of states leave to each other goes back to the system."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from engine.errors import EngineError
from scheduler.plan import Idle

_NO_HUGE_PAGES = 15  # MADV_NOHUGEPAGE
_LARGE = 32 << 20  # bytes of a unit whose ends, on huge pages that it shares, do not count
_MADVISE = ctypes.CDLL(None, use_errno=True).madvise


class IdleMemory:
    """`blocks` and `slots`: planes [n, units, bytes] in host memory, of which plane[:, i] is what unit i holds. Units
    below 32 MiB are kept on small pages: on huge ones, of 2 MiB, a unit would hold its neighbours' memory."""

    def __init__(self, blocks: Sequence[NDArray[np.uint8]], slots: Sequence[NDArray[np.uint8]]) -> None:
        self._blocks, self._slots = list(blocks), list(slots)
        for plane in (*self._blocks, *self._slots):
            if plane.shape[2] < _LARGE:
                _advise(plane.ctypes.data, plane.nbytes, _NO_HUGE_PAGES)

    def release(self, idle: Idle) -> None:
        """What is read there next is zeros. EngineError if the system does not take it."""
        for planes, units in ((self._blocks, idle.blocks), (self._slots, idle.slots)):
            runs = list(_runs(units))
            for plane in planes:
                for row in range(plane.shape[0]):
                    base = plane.ctypes.data + row * plane.strides[0]
                    for first, count in runs:
                        _advise(base + first * plane.strides[1], count * plane.strides[1], mmap.MADV_DONTNEED)


def _runs(units: Iterable[int]) -> Iterator[tuple[int, int]]:
    """(first, count) of those that follow one another."""
    for _, run in groupby(enumerate(sorted(set(units))), lambda pair: pair[1] - pair[0]):
        found = [unit for _, unit in run]
        yield found[0], len(found)


def _advise(address: int, num_bytes: int, advice: int) -> None:
    """Of the whole pages in there."""
    begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (address + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if end <= begin:
        return
    if _MADVISE(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), ctypes.c_int(advice)):
        number = ctypes.get_errno()
        if (advice, number) != (_NO_HUGE_PAGES, errno.EINVAL):  # a kernel without huge pages
            raise EngineError(f"memory of the cache cannot be given back: {os.strerror(number)}")
