"""Signs of life of the engine process, readable while its socket is silent. Torch-free.

    bytes 0..8    when the process last ran          a thread writes it, so a stopped process ages
    bytes 8..16   when the work in hand began        the loop writes it, 0 while idle, so a hanging step ages

Both are CLOCK_MONOTONIC nanoseconds, which all processes of a machine share, in a file that both sides map.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

BEAT_S = 0.5
_BYTES = 16


class Heartbeat:
    """The mapped file. `create` makes it for the reader, `Heartbeat(path)` opens it for the writer. Raises OSError."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _BYTES)
        self._words = memoryview(self._map).cast("q")
        self._stop = threading.Event()

    @classmethod
    def create(cls, path: Path) -> Heartbeat:
        """A file that counts as just beaten, so that the writer has time to start."""
        path.write_bytes(bytes(_BYTES))
        made = cls(path)
        made._words[0] = time.monotonic_ns()
        return made

    # ---- the engine's side

    def start(self) -> None:
        """Beat now, and from a thread until `stop`: whoever was slow to start is not silent."""
        self._words[0] = time.monotonic_ns()
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def stop(self) -> None:
        self._stop.set()

    @contextmanager
    def working(self) -> Iterator[None]:
        """Marks work that a hang would be noticed in."""
        self._words[1] = time.monotonic_ns()
        try:
            yield
        finally:
            self._words[1] = 0

    def _beat(self) -> None:
        while not self._stop.wait(BEAT_S):
            self._words[0] = time.monotonic_ns()

    # ---- the api's side

    def silent_s(self, since_s: float = 0.0) -> float:
        """Seconds since the last beat, or since `since_s` (time.monotonic) if that is later."""
        return time.monotonic() - max(self._words[0] / 1e9, since_s)

    def working_s(self) -> float:
        """Seconds that the work in hand has taken, 0 if there is none."""
        began = self._words[1]
        return time.monotonic() - began / 1e9 if began else 0.0
