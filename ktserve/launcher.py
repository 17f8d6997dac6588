"""The one way in which this project starts Python: `__main__.py` by its path, in this interpreter.

`-m`, `-c` and what multiprocessing starts would import from the working directory first, before Python 3.11 without a
way to forbid it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def program(*arguments: str) -> list[str]:
    """The command that runs one of our programs with its arguments (`ktserve/__main__.py` lists them)."""
    return [sys.executable, str(Path(__file__).with_name("__main__.py")), *arguments]


def module_of_checkout(name: str, *arguments: str) -> list[str]:
    """The command that runs a module which is not installed, such as those of `testing`, in the root of a checkout."""
    return [sys.executable, "-m", name, *arguments]


def die_with_parent() -> Callable[[], None]:
    """For `preexec_fn`: the kernel kills the child when its parent ends, however that happens (Linux)."""
    libc = ctypes.CDLL(None, use_errno=True)
    parent = os.getpid()

    def set_signal() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # the parent ended in between
            os._exit(1)

    return set_signal
