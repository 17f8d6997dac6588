"""What blocks and slots of states hold, to buffers and back, from a host's memory and a device's."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention.base import CacheBackend
from engine.attention.delta import DeltaBackend
from engine.device import Arrival
from engine.errors import EngineError
from engine.kv_disk.units import DeviceUnits, HostUnits, Units
from engine.launch import kv_store
from scheduler.memory.disk import DiskBlocks
from testing.harness import Harness
from testing.models.tiny import save_hf, tiny_model
from tests.engine.parity import prompts
from tests.engine.test_kv_disk import asked_again, stats, with_states

THREADS = 3


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 40)), min_size=1, max_size=5),
    count=st.integers(2, 6),
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_units_are_got_and_put_whole_and_alone(shapes, count, seed, data) -> None:
    """Of planes of drawn sizes. A device's units are a host's, layer by layer."""
    planes = [np.random.default_rng(seed).integers(0, 256, (n, count, size), np.uint8) for n, size in shapes]
    before = [plane.copy() for plane in planes]
    rows = [torch.from_numpy(plane[i]) for plane in planes for i in range(len(plane))]
    both: list[Units] = [HostUnits(planes), DeviceUnits(rows, THREADS)]
    source, target = data.draw(st.lists(st.integers(0, count - 1), min_size=2, max_size=2, unique=True))
    for units in both:
        assert units.num_bytes == sum(n * size for n, size in shapes)
        with units.buffer() as content, units.buffer() as other:
            assert content is not other and not np.shares_memory(content, other)
            units.get(source, content)
            assert content.tobytes() == b"".join(plane[:, source].tobytes() for plane in before)
            units.put(target, content)
        for plane, old in zip(planes, before, strict=True):
            assert np.array_equal(plane[:, target], old[:, source])
            rest = [unit for unit in range(count) if unit != target]
            assert np.array_equal(plane[:, rest], old[:, rest])
            plane[:] = old


@pytest.mark.parametrize("kind", ["host", "device"])
def test_threads_do_not_disturb_each_other(kind: str) -> None:
    plane = np.zeros((2, 64, 4096), np.uint8)
    rows = [torch.from_numpy(each) for each in plane]
    units: Units = HostUnits([plane]) if kind == "host" else DeviceUnits(rows, THREADS)

    def fill(unit: int) -> None:
        with units.buffer() as content:
            content[:] = unit
            units.put(unit, content)

    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(fill, range(64)))
    assert all((plane[:, unit] == unit).all() for unit in range(64))


def as_device(backends: Sequence[CacheBackend], device: str) -> Units:
    rows = [torch.from_numpy(plane[i]) for each in backends for plane in each.host_planes() for i in range(len(plane))]
    return DeviceUnits(rows, THREADS)


@pytest.fixture(scope="module")
def stateful(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stateful")
    save_hf(tiny_model(4, family="qwen3_next"), folder)
    return folder


def test_an_engine_that_copies_as_from_a_device(stateful, tmp_path, monkeypatch) -> None:
    """Blocks and snapshots come back, in this process and in the next one."""
    monkeypatch.setattr(DiskBlocks, "observe", lambda self, plan, seconds: None)  # however fast computing is, they wait
    plain = with_states(stateful, None)
    expected, _ = asked_again(plain)
    plain.close()
    monkeypatch.setattr(kv_store, "_units", as_device)
    for process in range(2):
        engine = with_states(stateful, tmp_path)
        found, cached = asked_again(engine)
        assert found == expected
        if process:
            assert cached == [144, 144, 176] and stats(engine)["disk_read_snapshots"] > 0
        for seed in range(20, 24):  # memory is taken by others
            engine.generate([prompts(seed, [300])[0]], max_tokens=1)
        assert asked_again(engine) == (expected, [144, 144, 176])
        engine.close()


def test_nothing_is_copied_before_what_was_launched_has_run(stateful, tmp_path, monkeypatch) -> None:
    """A step in flight may read a slot that another snapshot is read into."""
    waited: set[int] = set()
    copied = []
    monkeypatch.setattr(Arrival, "wait", lambda self: waited.add(threading.get_ident()))
    for name in ("get", "put"):
        original = getattr(HostUnits, name)

        def noted(self: HostUnits, unit: int, content: np.ndarray, name=name, original=original) -> None:
            copied.append((name, threading.get_ident() in waited))
            original(self, unit, content)

        monkeypatch.setattr(HostUnits, name, noted)
    monkeypatch.setattr(DiskBlocks, "observe", lambda self, plan, seconds: None)
    for _ in range(2):
        engine = with_states(stateful, tmp_path)
        asked_again(engine)
        engine.close()
    assert {name for name, _ in copied} == {"get", "put"} and all(after for _, after in copied)


def test_planes_are_where_the_cache_is(stateful) -> None:
    engine = Harness(stateful)
    kinds = {isinstance(each, DeltaBackend) for each in engine.runner.model.attention_backends}
    assert kinds == {False, True}
    for each in engine.runner.model.attention_backends:
        assert each.host_planes()
        with pytest.raises(EngineError, match="outside a GPU's memory"):
            each.device_planes()
    engine.close()
