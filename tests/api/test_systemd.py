"""A service of Type=notify: ready once it answers, alive while it runs, stopping when it ends."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest

from api.cli.systemd import notify, watchdog_s
from testing.waiting import PATIENCE_S, eventually
from tests.api.conftest import serving


def test_readiness_signs_of_life_and_the_end(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[bytes] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))

        def read() -> None:
            while (message := manager.recv(99)) != b"enough":
                said.append(message)

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        monkeypatch.setenv("WATCHDOG_USEC", "20000")
        with serving(model_dir, tmp_path) as server:
            eventually(lambda: len(said) > 3, "no signs of life")
            assert server.http.get("/v1/models").status_code == 200
        notify("enough")
        reader.join(PATIENCE_S)
    assert said[0] == b"READY=1" and said[-1] == b"STOPPING=1" and set(said[1:-1]) == {b"WATCHDOG=1"}


def test_a_listener_that_does_not_read_holds_nothing_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        for _ in range(5000):
            notify("WATCHDOG=1")


def test_names_of_the_abstract_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"ktserve-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind("\0" + name)
        manager.settimeout(PATIENCE_S)
        monkeypatch.setenv("NOTIFY_SOCKET", "@" + name)
        notify("READY=1")
        assert manager.recv(99) == b"READY=1"


def test_without_a_listener_it_is_a_warning(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", "/nowhere/notify")
    notify("READY=1")
    assert "READY=1 was not sent" in caplog.text


@pytest.mark.parametrize(
    ("microseconds", "pid", "seconds"),
    [("", None, None), ("0", None, None), ("x", None, None), ("3000000", None, 3.0), ("3000000", "1", None)],
)
def test_the_watchdog_is_this_process_s(
    microseconds: str, pid: str | None, seconds: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", microseconds)
    monkeypatch.delenv("WATCHDOG_PID", raising=False)
    if pid is not None:
        monkeypatch.setenv("WATCHDOG_PID", pid)
    assert watchdog_s() == seconds
