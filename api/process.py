"""The engine's child process: spawned so that it cannot outlive its parent, in a private directory for its socket."""

from __future__ import annotations

import asyncio
import ctypes
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_SECRETS = ("KTSERVE_API_KEY", "KTSERVE_ADMIN_KEY")
_MAX_BASE = 107 - len("/ktserve-xxxxxxxx/engine-999")  # sun_path holds 107 characters


def _die_with_parent() -> Callable[[], None]:
    """For `preexec_fn`: the kernel kills the child when its parent ends, however that happens (Linux)."""
    libc = ctypes.CDLL(None, use_errno=True)
    parent = os.getpid()

    def set_signal() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # the parent ended in between
            os._exit(1)

    return set_signal


def child_environment() -> dict[str, str]:
    """This environment without our keys, with the project's packages importable wherever the child is started."""
    root = str(Path(__file__).resolve().parent.parent)
    paths = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    if root not in paths:
        paths.append(root)
    inherited = {name: value for name, value in os.environ.items() if name not in _SECRETS}
    return {**inherited, "PYTHONPATH": os.pathsep.join(paths)}


async def spawn(command: Sequence[str]) -> asyncio.subprocess.Process:
    """Start `command` in a session of its own (Ctrl-C is for the parent, which drains). Its stdout goes to stderr:
    libraries print there, and stdout belongs to the person who talks to us. Raises OSError."""
    return await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=sys.__stderr__.fileno() if sys.__stderr__ is not None else asyncio.subprocess.DEVNULL,
        start_new_session=True,
        env=child_environment(),
        preexec_fn=_die_with_parent() if sys.platform == "linux" else None,
    )


async def end(process: asyncio.subprocess.Process, grace_s: float) -> None:
    """Wait `grace_s` for the process to end by itself, then kill it."""
    if process.returncode is None:
        try:
            await asyncio.wait_for(process.wait(), grace_s)
        except asyncio.TimeoutError:
            process.kill()
            await process.wait()


class SocketDir:
    """A directory only this user can enter (0700), for the ipc socket; `remove` deletes it."""

    def __init__(self) -> None:
        base = None if len(tempfile.gettempdir().encode()) <= _MAX_BASE else "/tmp"
        self.path = Path(tempfile.mkdtemp(prefix="ktserve-", dir=base))

    def address(self, number: int) -> str:
        return f"ipc://{self.path}/engine-{number}"

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
