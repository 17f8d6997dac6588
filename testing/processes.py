"""The processes of a server, as a test sees them: any of them may end while it is looked at."""

from __future__ import annotations

import contextlib
import signal
import subprocess

import psutil


def kill_all(server: subprocess.Popen[bytes]) -> None:
    """The server and all its processes, at once: stopped first, so that none sees another one's end."""
    family = [psutil.Process(server.pid)]
    family[0].send_signal(signal.SIGSTOP)
    family += family[0].children(recursive=True)
    for sent in (signal.SIGSTOP, signal.SIGKILL):
        for each in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.send_signal(sent)
    server.wait()


def engine_of(server: int) -> psutil.Process:
    """The engine that the server of this process id runs now."""
    for child in psutil.Process(server).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "--heartbeat" in child.cmdline():
                return child
    raise AssertionError(f"process {server} has no engine")


def gone(pid: int) -> bool:
    """It has ended, whether or not its parent has asked how: nobody may ask what has lost its parent."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
