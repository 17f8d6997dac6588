"""Packed experts are pinned while something reads them from a GPU, and not a moment longer."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from engine.errors import ExpertBackendError
from engine.experts.capabilities import PackedWeights
from engine.experts.gpu import source as gpu_source
from engine.experts.gpu.layout import Sizes
from engine.experts.gpu.source import PackedSource

SIZES = Sizes(2, 1, 32, 32)


class Layer:
    """Two shards, as native._native.ExpertLayer shows them."""

    formats = ("f32", "f32", "f32")
    shards = 2

    def __init__(self) -> None:
        self.memory = [torch.zeros(size, dtype=torch.uint8) for size in (3 * 2 * 32 * 32 * 4, 0)]

    def shard(self, index: int) -> tuple[int, int]:
        # One pair of panels: all of it is the last shard's.
        return self.memory[1 - index].data_ptr() or 4096, max(self.memory[1 - index].numel(), 1)


class Driver:
    def __init__(self) -> None:
        self.pinned: list[int] = []
        self.refuse_after = 1 << 30

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if len(self.pinned) >= self.refuse_after:
            return 2
        self.pinned.append(address)
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        self.pinned.remove(address)
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(gpu_source, "_cudart", lambda: made)
    return made


def source() -> PackedSource:
    made: Any = PackedSource(PackedWeights({0: Layer(), 1: Layer()}), SIZES, torch.device("cuda"))
    for layer in (0, 1, 0):
        made.add(layer)
    return made


def test_closed(driver: Driver) -> None:
    made = source()
    assert len(driver.pinned) == 4
    made.close()
    assert not driver.pinned
    made.close()


def test_collected(driver: Driver) -> None:
    made = source()
    assert len(driver.pinned) == 4
    del made
    gc.collect()
    assert not driver.pinned


def test_half_a_layer_is_not_left_pinned(driver: Driver) -> None:
    driver.refuse_after = 1
    with pytest.raises(ExpertBackendError, match="CUDA error 2"):
        source()
    assert not driver.pinned
