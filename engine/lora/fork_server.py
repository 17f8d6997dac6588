"""Forks of a process that has imported torch once and does nothing else: `ktserve/__main__.py adapter-readers`.

    engine ──a socket for each fork──> server ──fork──> keeper ──fork──> job, at the other end of that socket
       ^─────────────────────── how the job ended ────────┘

A keeper lives as long as its job: it ends the job when the engine closes the socket, and tells how the job ended. Each
of them ends with its parent.
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
import signal
import socket
import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import NoReturn

from ktserve.launcher import program

_PR_SET_PDEATHSIG = 1
_BYTES = 1  # of a message that brings a socket


class ForkServer:
    """The engine's side. Starts the server when it is needed, or ahead of that, and again if it has died, until
    `close`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._closed = False
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def start(self) -> None:
        """Ahead of the first fork, which need not wait for imports then; where no process can be started now, it is
        tried again there."""
        with self._lock, suppress(OSError):
            self._start()

    def fork(self) -> socket.socket:
        """A socket to a job of its own; closing it ends the job. It ends without a word of how the job ended if the
        server or the keeper was killed. Raises OSError if no process can be started, or after `close`."""
        ours, theirs = socket.socketpair()
        try:
            with self._lock, theirs:
                self._send(theirs)
        except OSError:
            ours.close()
            raise
        return ours

    def _send(self, theirs: socket.socket) -> None:
        if self._control is not None and self._process is not None and self._process.poll() is None:
            with suppress(OSError):  # it has just died
                socket.send_fds(self._control, [bytes(_BYTES)], [theirs.fileno()])
                return
        socket.send_fds(self._start(), [bytes(_BYTES)], [theirs.fileno()])

    def _start(self) -> socket.socket:
        self._stop()
        if self._closed:
            raise OSError(errno.ESHUTDOWN, "no process is forked any more")
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(program("adapter-readers"), stdin=theirs.fileno())
        return self._control

    def close(self) -> None:
        """Ends the server with all that it has forked, for good."""
        with self._lock:
            self._closed = True
            self._stop()

    def _stop(self) -> None:
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._process = self._control = None


def serve(job: Callable[[Connection], None], ended: Callable[[int], bytes]) -> NoReturn:
    """The server: forks a `job` for every socket that comes in on stdin, until that closes. `ended`: the message that
    tells a job's exit status (negative: a signal's number)."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the keepers
    with socket.socket(fileno=os.dup(0)) as control:
        while True:
            got, descriptors, _, _ = socket.recv_fds(control, _BYTES, 1)
            if not got:
                os._exit(0)
            server = os.getpid()
            if os.fork() == 0:
                control.close()
                _end_with(server)
                _keep(Connection(descriptors[0]), job, ended)
            os.close(descriptors[0])


def _keep(connection: Connection, job: Callable[[Connection], None], ended: Callable[[int], bytes]) -> NoReturn:
    keeper = os.getpid()
    child_ended, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # a signal without a handler wakes nobody
    child = os.fork()
    if child == 0:
        _end_with(keeper)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        os.close(child_ended)
        os.close(wake)
        with suppress(ConnectionError, EOFError):  # nobody wants what it reads any more
            job(connection)
        os._exit(0)
    poll = select.poll()
    poll.register(child_ended, select.POLLIN)
    poll.register(connection.fileno(), select.POLLRDHUP)  # what the engine has sent is the job's to read
    if child_ended not in dict(poll.poll()):
        os.kill(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with suppress(OSError):  # nobody listens any more
        connection.send_bytes(ended(status))
    os._exit(0)


def _end_with(parent: int) -> None:
    """The kernel kills this process when `parent`, which has forked it, ends (Linux)."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended in between
        os._exit(1)
