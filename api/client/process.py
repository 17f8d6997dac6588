"""The engine's child process: spawned so that it cannot outlive its parent, in a private directory for its socket."""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ktserve.launcher import die_with_parent, program

ENGINE_COMMAND = tuple(program("engine"))
_SECRETS = ("KTSERVE_API_KEY", "KTSERVE_ADMIN_KEY")
_LOCK = "lock"
_MAX_BASE = 107 - len("/ktserve-xxxxxxxx/engine-999")  # sun_path holds 107 characters


def child_environment() -> dict[str, str]:
    """This environment without our keys."""
    return {name: value for name, value in os.environ.items() if name not in _SECRETS}


async def spawn(command: Sequence[str]) -> asyncio.subprocess.Process:
    """Start `command` in a session of its own (Ctrl-C is for the parent, which drains). Its stdout goes to stderr:
    libraries print there, and stdout belongs to the person who talks to us. Raises OSError."""
    return await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=sys.__stderr__.fileno() if sys.__stderr__ is not None else asyncio.subprocess.DEVNULL,
        start_new_session=True,
        env=child_environment(),
        preexec_fn=die_with_parent() if sys.platform == "linux" else None,
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
    """A directory only this user can enter (0700), for the ipc socket; `remove` deletes it.

    A lock in it is held as long as this process lives. So the next start can tell and remove the directories of
    processes that were killed. Raises OSError.
    """

    def __init__(self) -> None:
        base = Path(tempfile.gettempdir() if len(tempfile.gettempdir().encode()) <= _MAX_BASE else "/tmp")
        for left in base.glob("ktserve-*"):
            _remove_if_left(left)
        while not self._made(base):  # a start beside this one took it for a dead one's
            os.close(self._lock)

    def _made(self, base: Path) -> bool:
        """Make and lock the directory; False if it was removed between the two."""
        self.path = Path(tempfile.mkdtemp(prefix="ktserve-", dir=base))
        self._lock = os.open(self.path / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        return os.fstat(self._lock).st_nlink > 0

    def address(self, number: int) -> str:
        return f"ipc://{self.path}/engine-{number}"

    def heartbeat(self, number: int) -> Path:
        return self.path / f"beat-{number}"

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _remove_if_left(folder: Path) -> None:
    """Remove a directory of this user's whose process has ended. One without a lock may be in the making: it stays."""
    try:
        if folder.is_symlink() or folder.stat().st_uid != os.getuid():
            return
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    except BlockingIOError:
        pass  # its process lives
    finally:
        os.close(lock)
