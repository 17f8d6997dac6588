"""A server with the demo model on this machine, to be attacked."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ktserve.launcher import program
from loadtests.chaos.wire import Target

_POLL_S = 0.2
_END_S = 60.0


@contextmanager
def serving(log: Path, flags: Sequence[str], admin_key: str) -> Iterator[tuple[int, Target]]:
    """`ktserve serve` on a free port, once it serves: its process id and where it is. It writes to `log`. Raises
    RuntimeError if it ends before it serves."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("KTSERVE_")}
    env["KTSERVE_ADMIN_KEY"] = admin_key
    with log.open("wb") as sink:
        process = subprocess.Popen(program("serve", "--port", "0", *flags), stdout=sink, stderr=sink, env=env)
    try:
        yield process.pid, _target(process, log, admin_key)
    finally:
        process.terminate()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _target(process: subprocess.Popen[bytes], log: Path, key: str) -> Target:
    while process.poll() is None:
        for line in log.read_text(errors="replace").splitlines():
            if line.startswith("at ") and line.endswith("/v1"):
                host, _, port = line.split("//")[1].removesuffix("/v1").rpartition(":")
                return Target(host, int(port), key)
        time.sleep(_POLL_S)
    raise RuntimeError(f"the server did not start:\n{log.read_text(errors='replace')}")
