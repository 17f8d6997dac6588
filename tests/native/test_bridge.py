"""The handshake by which a GPU runs expert tasks, with a thread in the GPU's place."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
import torch

from engine.experts.base import ExpertBuffers
from native import _native
from tests.native.test_experts import BF16, Layer, batch, error, expected, make

Bridge = _native.Bridge


class Device:
    """Memory that both sides see, as a GPU would map it."""

    def __init__(self, capacity: int = 8) -> None:
        raw = np.zeros(capacity * Bridge.ENTRY_BYTES + 64, np.uint8)
        self.bytes = raw[-raw.ctypes.data % 64 :]
        self.address = self.bytes.ctypes.data

    def _word(self, entry: int, offset: int, dtype: type) -> Any:
        start = entry * Bridge.ENTRY_BYTES + offset
        return self.bytes[start : start + np.dtype(dtype).itemsize].view(dtype)

    def post(self, entry: int, number: int) -> None:
        self._word(entry, Bridge.POSTED_OFFSET, np.uint64)[0] = number

    def done(self, entry: int) -> int:
        return int(self._word(entry, Bridge.DONE_OFFSET, np.uint64)[0])

    def error(self, entry: int) -> int:
        return int(self._word(entry, Bridge.ERROR_OFFSET, np.uint32)[0])

    def wait(self, entry: int, number: int) -> None:
        end = time.perf_counter() + 10
        while self.done(entry) < number:
            assert time.perf_counter() < end
            time.sleep(0)


@pytest.fixture
def pool() -> Any:
    return _native.WorkerPool([[0, 1]])


@pytest.fixture
def device() -> Device:
    return Device()


def bound(pool: Any, rows: int = 4, seed: int = 0) -> tuple[Layer, ExpertBuffers, Any]:
    layer = Layer("Q8_0")
    experts = make(pool, layer, BF16)
    b = batch(rows, BF16, seed=seed)
    return layer, b, experts.bind(0, b).handle.task


def test_a_device_replays_tasks_with_changing_batches(pool: Any, device: Device) -> None:
    bridge = Bridge(pool, device.address, 8)
    made = [bound(pool, seed=seed) for seed in range(3)]
    entries = [bridge.add(task) for _, _, task in made]
    assert entries == [0, 1, 2]
    assert bridge.entries == 3

    def stream() -> None:
        for number in range(1, 40):
            for entry, (_, b, _) in zip(entries, made, strict=True):
                b.bsz[0] = number % 5
                device.post(entry, number * 10)
                device.wait(entry, number * 10)

    bridge.begin_step()
    thread = threading.Thread(target=stream)
    thread.start()
    thread.join()
    bridge.end_step()
    assert bridge.take_errors() == []
    for layer, b, _ in made:
        assert int(b.bsz) == 4
        assert error(b.out[:4], expected(layer, b, {})) < 0.025


def test_many_posts_between_two_waits(pool: Any, device: Device) -> None:
    bridge = Bridge(pool, device.address, 8)
    entry = bridge.add(bound(pool)[2])
    bridge.begin_step()
    for number in range(1, 200):
        bridge.post(entry, number)
        assert bridge.wait(entry, number, 5.0)
    bridge.end_step()
    assert device.done(entry) == 199
    with pytest.raises(ValueError, match="not greater"):
        bridge.post(entry, 199)


def test_an_error_frees_the_device_and_reaches_the_engine(pool: Any, device: Device) -> None:
    bridge = Bridge(pool, device.address, 8)
    _, b, task = bound(pool)
    entry = bridge.add(task)
    bridge.begin_step()
    b.ids[0, 0] = 99
    device.post(entry, 1)
    device.wait(entry, 1)
    assert device.error(entry) == 1
    assert bridge.take_errors() == ["task 0, call 1: ids: 99; allowed are -1 to 7"]
    assert device.error(entry) == 0
    b.ids[0, 0] = 1
    device.post(entry, 2)
    device.wait(entry, 2)
    bridge.end_step()
    assert bridge.take_errors() == []
    assert torch.isfinite(b.out[:4].float()).all()


def test_a_time_out_frees_the_waiter(pool: Any, device: Device) -> None:
    bridge = Bridge(pool, device.address, 8)
    entry = bridge.add(bound(pool)[2])
    start = time.perf_counter()
    assert not bridge.wait(entry, 1, 0.05)  # nothing was posted
    assert 0.04 < time.perf_counter() - start < 5
    assert device.error(entry) == 2
    assert bridge.take_errors() == ["task 0: no answer in time"]
    bridge.begin_step()
    bridge.post(entry, 1)
    assert bridge.wait(entry, 1, 5.0)
    bridge.end_step()


def test_it_sleeps_between_steps(pool: Any, device: Device) -> None:
    bridge = Bridge(pool, device.address, 8)
    entry = bridge.add(bound(pool)[2])
    bridge.begin_step()
    bridge.post(entry, 1)
    assert bridge.wait(entry, 1, 5.0)
    bridge.end_step()
    time.sleep(0.02)
    used, start = time.process_time(), time.perf_counter()
    time.sleep(0.3)
    assert (time.process_time() - used) / (time.perf_counter() - start) < 0.01
    bridge.begin_step()  # and wakes again
    bridge.post(entry, 2)
    assert bridge.wait(entry, 2, 5.0)
    bridge.end_step()


def test_misuse_is_refused(pool: Any) -> None:
    device = Device(1)
    with pytest.raises(ValueError, match="aligned"):
        Bridge(pool, device.address + 8, 1)
    with pytest.raises(ValueError, match="capacity"):
        Bridge(pool, device.address, 0)
    bridge = Bridge(pool, device.address, 1)
    task = bound(pool)[2]
    bridge.add(task)
    with pytest.raises(ValueError, match="1 entries are taken"):
        bridge.add(task)
    with pytest.raises(IndexError, match="entry: 1"):
        bridge.post(1, 1)
    with pytest.raises(RuntimeError, match="end_step without begin_step"):
        bridge.end_step()


def test_it_ends_within_a_step(pool: Any, device: Device) -> None:
    bridge = Bridge(pool, device.address, 8)
    bridge.begin_step()
    del bridge
    assert -1 not in pool.trace(50)
    with pytest.raises(RuntimeError):
        pool.end_step()  # the bridge has ended its own
