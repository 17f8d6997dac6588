"""A server as a child process: until it answers, and until it has ended."""

from __future__ import annotations

import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

_POLL_S = 0.1


class ServerError(Exception):
    """The server could not be started."""


@contextmanager
def ended_after(
    command: Sequence[str],
    *,
    env: dict[str, str] | None = None,
    output: IO[bytes] | None = None,
    patience_s: float = 60,
) -> Iterator[subprocess.Popen[bytes]]:
    """The process of `command`, which writes to `output` (None: as this one); ended by SIGTERM, or killed."""
    process = subprocess.Popen(command, env=env, stdout=output, stderr=output)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(patience_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_ready(process: subprocess.Popen[bytes], url: str, patience_s: float) -> None:
    """Until `url` answers with 200. ServerError if the process ends before, or that takes too long."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ServerError(f"the server ended with status {process.returncode}")
        with suppress(OSError), urllib.request.urlopen(url, timeout=5):
            return
        time.sleep(_POLL_S)
    raise ServerError(f"{url} was not ready after {patience_s:g} s")


def served_at(process: subprocess.Popen[bytes], log: Path) -> str:
    """The URL that `ktserve serve --port 0` prints into `log` once it serves. ServerError if it ends before."""
    while process.poll() is None:
        for line in log.read_text(errors="replace").splitlines():
            if line.startswith("at ") and line.endswith("/v1"):
                return line.removeprefix("at").strip().removesuffix("/v1")
        time.sleep(_POLL_S)
    raise ServerError(f"the server did not start:\n{log.read_text(errors='replace')}")
