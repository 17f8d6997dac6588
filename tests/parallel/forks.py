"""Starts that cost no import of torch: ranks forked from a process that has done it, adapters read in this one."""

from __future__ import annotations

import multiprocessing
import socket
import subprocess
from collections.abc import Callable
from multiprocessing.connection import Connection

from engine.lora.adapter import AdapterWeights
from engine.lora.budget import AdapterSize
from engine.lora.files.reader import read_adapter
from engine.lora.reading.process import ReadRequest

_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(["engine.parallel.follower"])


def _run(orders: socket.socket, slots: socket.socket) -> None:
    from engine.parallel.follower import serve

    serve(Connection(orders.detach()), slots)


class ForkedRank:
    """As much of subprocess.Popen as `engine.parallel.leader` uses."""

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


class Reader:
    """As engine.lora.reads.Reader."""

    def read(self, request: ReadRequest, make_room: Callable[[AdapterSize], None]) -> AdapterWeights:
        return read_adapter(request.path, request.config, name=request.name)

    def close(self) -> None:
        """There is nothing to end."""
