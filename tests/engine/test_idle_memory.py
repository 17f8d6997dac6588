"""What is given back to the system is what was named, page by page."""

from __future__ import annotations

import mmap

import numpy as np
import pytest

from engine.memory.idle import IdleMemory
from scheduler.plan import Idle

PAGE = mmap.PAGESIZE


def plane(rows: int, units: int, num_bytes: int) -> np.ndarray:
    memory = np.frombuffer(mmap.mmap(-1, rows * units * num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
    memory[:] = 1
    return memory.reshape(rows, units, num_bytes)


@pytest.mark.parametrize("num_bytes", [PAGE // 4, PAGE, PAGE + 64, 3 * PAGE])
@pytest.mark.parametrize("units", [[], [0], [2, 3, 4], [9, 0, 1, 5, 9]])
def test_whole_pages_of_the_named_units_are_given_back(num_bytes: int, units: list[int]) -> None:
    blocks, slots = plane(1, 10, num_bytes), plane(3, 10, 2 * PAGE)
    memory = IdleMemory([blocks], [slots])
    memory.release(Idle(units, [7]))
    named = np.zeros(blocks.shape, bool)
    named[:, units] = True
    pages = named.reshape(-1)[: named.size // PAGE * PAGE].reshape(-1, PAGE).all(1)
    left = blocks.reshape(-1)[: len(pages) * PAGE].reshape(-1, PAGE)
    assert not left[pages].any() and left[~pages].all()
    assert not slots[:, 7].any() and slots.sum() == 3 * 9 * 2 * PAGE
