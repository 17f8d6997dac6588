"""Starts that cost no import of torch: ranks forked from a process that has done it."""

from __future__ import annotations

import multiprocessing
import socket
import subprocess
from multiprocessing.connection import Connection

_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(["engine.launch.follower"])


def _run(orders: socket.socket, slots: socket.socket) -> None:
    from engine.launch.follower import serve

    serve(Connection(orders.detach()), slots)


class ForkedRank:
    """As much of subprocess.Popen as `engine.launch.leader` uses."""

    def __init__(self, orders: socket.socket, slots: socket.socket) -> None:
        self._process = _forks.Process(target=_run, args=(orders, slots), daemon=True)
        self._process.start()

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("rank", timeout or 0)
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()
