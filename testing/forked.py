"""Programs without the seconds that their imports take: each is a fork of a process that has made them.

Each has a process, an environment and files of its own, as `python -m MODULE ARGUMENTS` in the repository's root has.
The process that forks them is started by the first one and ends with the process of the tests.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import BinaryIO, NoReturn

ROOT = Path(__file__).parents[1]
COMMAND_LINE = ("api.cli.main", "api.cli.early", "api.cli.serve")
_MOST_BYTES = 1 << 20  # a command's arguments and environment


class Forked:
    """As much of subprocess.Popen as tests use. `files`: its input, output and errors. `imported`: the modules that it
    need not import."""

    def __init__(
        self,
        module: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        files: tuple[BinaryIO, BinaryIO, BinaryIO],
        imported: tuple[str, ...] = COMMAND_LINE,
    ) -> None:
        self.returncode: int | None = None
        self._report, theirs = socket.socketpair()
        with theirs:
            order = json.dumps([module, list(argv), dict(env)]).encode()
            fds = [*(file.fileno() for file in files), theirs.fileno()]
            socket.send_fds(_origin(imported)[0], [order], fds)
        self.pid = self._number()

    def _number(self) -> int:
        numbers = array.array("q")
        numbers.frombytes(self._report.recv(numbers.itemsize, socket.MSG_WAITALL))
        return numbers[0]

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status, negative for a signal. Raises TimeoutExpired."""
        if self.returncode is None:
            with selectors.DefaultSelector() as selector:
                selector.register(self._report, selectors.EVENT_READ)
                if not selector.select(timeout):
                    raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
            self.returncode = self._number()
            self._report.close()
        return self.returncode

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run(
    module: str,
    argv: Sequence[str],
    env: Mapping[str, str],
    *,
    timeout: float,
    stdin: str = "",
    imported: tuple[str, ...] = COMMAND_LINE,
) -> subprocess.CompletedProcess[str]:
    """Until it ends. Raises TimeoutExpired, after which it has ended too."""
    with TemporaryFile() as given, TemporaryFile() as output, TemporaryFile() as errors:
        given.write(stdin.encode())
        given.seek(0)
        process = Forked(module, argv, env, (given, output, errors), imported)
        try:
            status = process.wait(timeout)
        finally:
            process.kill()
            process.wait()
        for file in (output, errors):
            file.seek(0)
        return subprocess.CompletedProcess([module, *argv], status, output.read().decode(), errors.read().decode())


@functools.cache
def _origin(imported: tuple[str, ...]) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """The process that forks, and a connection to it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for number in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        ours.setsockopt(socket.SOL_SOCKET, number, _MOST_BYTES)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(theirs.fileno()), *imported], cwd=ROOT, pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
    return ours, process


class _Origin:
    def __init__(self, orders: socket.socket) -> None:
        self._orders = orders
        self._running: dict[int, int] = {}  # process ids, and the descriptors at which their ends are reported
        self._ended, woken = socket.socketpair()
        self._ended.setblocking(False)
        woken.setblocking(False)
        self._woken = woken
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(woken.fileno())

    def serve(self) -> None:
        """Until the tests' process ends."""
        with selectors.DefaultSelector() as selector:
            for wait_for in (self._orders, self._ended):
                selector.register(wait_for, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fileobj is self._ended:
                        self._reap()
                    elif not self._start():
                        return

    def _start(self) -> bool:
        order, fds, _, _ = socket.recv_fds(self._orders, _MOST_BYTES, 4)
        if not order:
            return False
        module, argv, env = json.loads(order)
        if (pid := os.fork()) == 0:
            self._become(module, argv, env, fds)
        *files, report = fds
        os.write(report, array.array("q", [pid]).tobytes())
        self._running[pid] = report
        for fd in files:
            os.close(fd)
        return True

    def _become(self, module: str, argv: list[str], env: dict[str, str], fds: list[int]) -> NoReturn:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for held in (self._orders, self._ended, self._woken):
            held.close()
        for number in range(3):
            os.dup2(fds[number], number)
        for fd in (*fds, *self._running.values()):
            os.close(fd)
        os.environ.clear()
        os.environ.update(env)
        sys.argv[1:] = argv
        status = 1
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
            status = 0
        except SystemExit as ended:
            status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        except BaseException:  # noqa: BLE001  # said as the interpreter says it, and the fork ends
            sys.excepthook(*sys.exc_info())
        finally:
            threading._shutdown()  # type: ignore[attr-defined]  # joins threads, as the interpreter does at its end
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
            ctypes.CDLL(None).fflush(None)  # what libraries print
            os._exit(status)

    def _reap(self) -> None:
        self._ended.recv(4096)
        for pid in list(self._running):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                report = self._running.pop(pid)
                with contextlib.suppress(BrokenPipeError):  # nobody asks any more
                    os.write(report, array.array("q", [os.waitstatus_to_exitcode(status)]).tobytes())
                os.close(report)


def _main() -> None:
    fd, *imported = sys.argv[1:]
    for name in imported:
        importlib.import_module(name)
    for name in imported:
        sys.modules.pop(name, None)  # runpy runs them again
    gc.freeze()  # forks share these pages
    _Origin(socket.socket(fileno=int(fd))).serve()


if __name__ == "__main__":
    _main()
