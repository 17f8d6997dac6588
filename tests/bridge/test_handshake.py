"""The native handshake, with threads in the stream's place that write and read the words alone."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from native import _native
from testing.waiting import PATIENCE_S, comes_to_rest, eventually

CAPACITY = 64


@pytest.fixture(scope="module")
def pool() -> Any:
    return _native.WorkerPool([[0, 1]])


class Stream:
    """What a GPU does: stores a number in `posted`, loads `done` until it is there."""

    def __init__(self, words: torch.Tensor) -> None:
        self.posted, self.done, self.expired = (row.numpy() for row in words)  # views: they keep the words alive
        self.numbers = [0] * CAPACITY

    def post(self, channel: int) -> int:
        self.numbers[channel] += 1
        self.posted[channel] = self.numbers[channel]
        return self.numbers[channel]

    def wait(self, channel: int, seconds: float = PATIENCE_S) -> bool:
        """Whether the task did not fail."""
        end = time.monotonic() + seconds
        while self.done[channel] // 2 < self.numbers[channel]:
            if time.monotonic() > end:
                self.expired[channel] = self.numbers[channel]
                return False
            time.sleep(0)
        return bool(self.done[channel] % 2 == 0)


def make(pool: Any, **options: int) -> tuple[Any, Stream]:
    words = torch.zeros(3, CAPACITY, dtype=torch.int64)
    bridge = _native.Bridge(pool, words.data_ptr(), CAPACITY, **options)
    return bridge, Stream(words)


def test_thousands_of_replays_over_many_channels(pool: Any) -> None:
    bridge, stream = make(pool)
    channels = [bridge.add(_native.IdleTask()) for _ in range(48)]
    bridge.wake()
    for _ in range(60):
        for channel in channels:
            stream.post(channel)
            assert stream.wait(channel)
    assert stream.done[:48].tolist() == [120] * 48
    assert len(bridge.drive(channels, 50)) == 50
    assert stream.posted[:48].tolist() == [110] * 48
    assert bridge.take_failures() == []


def test_streams_of_their_own_do_not_disturb_each_other(pool: Any) -> None:
    bridge, stream = make(pool)
    channels = [bridge.add(_native.IdleTask(0.0002)) for _ in range(4)]

    def drive(channel: int) -> None:
        for _ in range(100):
            stream.post(channel)
            assert stream.wait(channel)

    threads = [threading.Thread(target=drive, args=(c,)) for c in channels]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert stream.done[:4].tolist() == [200] * 4


def test_a_failure_frees_the_stream_and_keeps_its_message(pool: Any) -> None:
    bridge, stream = make(pool)
    bad, good = bridge.add(_native.IdleTask(error="no such expert")), bridge.add(_native.IdleTask())
    for _ in range(2):
        stream.post(bad)
        assert not stream.wait(bad)
        stream.post(good)
        assert stream.wait(good)
    assert bridge.take_failures() == [(bad, 1, "no such expert"), (bad, 2, "no such expert")]
    assert bridge.take_failures() == []
    for _ in range(100):
        stream.post(bad)
        stream.wait(bad)
    assert len(bridge.take_failures()) == 64  # bounded


def test_a_late_answer_is_not_taken_for_the_next(pool: Any) -> None:
    bridge, stream = make(pool)
    slow = bridge.add(_native.IdleTask(0.5))
    stream.post(slow)
    assert not stream.wait(slow, 0.0)
    assert bridge.take_failures() == [(slow, 1, "the pool did not answer in time")]
    assert bridge.take_failures() == []
    stream.post(slow)
    assert stream.wait(slow)  # of number 2; number 1 was answered on the way
    assert stream.done[slow] == 4
    assert bridge.post(slow) == 3
    assert bridge.wait(slow, 0.01) == 2
    assert bridge.wait(slow, PATIENCE_S) == 0


def test_it_parks_and_wakes(pool: Any) -> None:
    bridge, stream = make(pool, spin_us=1000, nap_us=2000)
    channel = bridge.add(_native.IdleTask())
    stream.post(channel)  # unannounced: found at the next look
    assert stream.wait(channel)
    eventually(lambda: bridge.parked)
    comes_to_rest(0.05)
    bridge.wake()
    stream.post(channel)
    assert stream.wait(channel)


def test_misuse_is_refused(pool: Any) -> None:
    words = torch.zeros(3, 1, dtype=torch.int64)
    bridge = _native.Bridge(pool, words.data_ptr(), 1)
    with pytest.raises(ValueError, match="channel: 0; there are 0"):
        bridge.post(0)
    bridge.add(_native.IdleTask())
    with pytest.raises(ValueError, match="all 1 channels are taken"):
        bridge.add(_native.IdleTask())
    with pytest.raises(ValueError, match="capacity: 0"):
        _native.Bridge(pool, words.data_ptr(), 0)
    with pytest.raises(ValueError, match="multiple of 8"):
        _native.Bridge(pool, words.data_ptr() + 4, 1)
    with pytest.raises(ValueError, match="nap_us: 0"):
        _native.Bridge(pool, words.data_ptr(), 1, nap_us=0)
    bridge.close()
    with pytest.raises(RuntimeError, match="closed"):
        bridge.post(0)
    bridge.close()
