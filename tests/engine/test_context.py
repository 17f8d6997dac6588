"""A GPU's context is asked of the driver before torch is there; without a GPU nothing comes of it."""

from __future__ import annotations

import ctypes
import threading

import pytest

from engine.config import EngineConfig
from engine.launch import context


class Driver:
    """Answers each call with a status, and remembers the calls."""

    def __init__(self, **statuses: int) -> None:
        self.called: list[str] = []
        self._statuses = statuses

    def __getattr__(self, name: str):
        def call(*_: object) -> int:
            self.called.append(name)
            return self._statuses.get(name, 0)

        return call


def begin(device: str, rules: str | None = None) -> None:
    """And wait for its thread."""
    before = set(threading.enumerate())
    context.begin_context(EngineConfig(device=device, rules=rules))
    for thread in set(threading.enumerate()) - before:
        thread.join()


@pytest.mark.parametrize(
    ("device", "statuses", "called"),
    [
        ("auto", {}, ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain"]),
        ("cuda", {}, ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain"]),
        ("auto", {"cuInit": 100}, ["cuInit"]),
        ("auto", {"cuDeviceGet": 101}, ["cuInit", "cuDeviceGet"]),
        ("cpu", {}, []),
    ],
)
def test_as_far_as_the_driver_goes(device, statuses, called, monkeypatch) -> None:
    driver = Driver(**statuses)
    monkeypatch.setattr(ctypes, "CDLL", lambda _: driver)
    begin(device)
    assert driver.called == called


@pytest.mark.parametrize(("device", "asked"), [("auto", False), ("cuda", True)])
def test_rules_may_leave_a_gpu_alone(device, asked, monkeypatch) -> None:
    driver = Driver()
    monkeypatch.setattr(ctypes, "CDLL", lambda _: driver)
    begin(device, "cpu")
    assert bool(driver.called) == asked


def test_without_a_driver(monkeypatch) -> None:
    monkeypatch.setattr(context, "_DRIVER", "libno-such-driver.so.1")
    begin("auto")
