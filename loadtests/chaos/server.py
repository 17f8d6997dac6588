"""A server on this machine, to be attacked."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ktserve.launcher import program
from loadtests.child import ended_after, served_at
from loadtests.http import Server


@contextmanager
def serving(log: Path, flags: Sequence[str], admin_key: str) -> Iterator[tuple[int, Server]]:
    """`ktserve serve` on a free port, once it serves: its process id and where it is. It writes to `log`. Raises
    ServerError if it ends before it serves."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("KTSERVE_")}
    env["KTSERVE_ADMIN_KEY"] = admin_key
    command = program("serve", "--port", "0", *flags)
    with log.open("wb") as sink, ended_after(command, env=env, output=sink) as process:
        yield process.pid, Server(served_at(process, log), admin_key)
