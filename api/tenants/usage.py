"""Usage as NDJSON, for billing: one line for each answer that has ended.

Lines are written by a thread. While the disk is full they wait, the newest 65,536 of them, and are written when there
is room again; a line is written whole or not at all.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from typing import Any

import msgspec

from engine.errors import UserError

log = logging.getLogger("ktserve")
_MOST_WAITING = 65_536
_RETRY_S = 1.0
_encode = msgspec.json.Encoder().encode


class UsageLog:
    """`reopen` starts the file again under its name, after lines that wait: what moved it away has them. Raises
    UserError if it cannot be opened."""

    def __init__(self, path: str) -> None:
        self._path = path
        try:
            self._file = _open(path)
        except OSError as error:
            raise UserError(f"--usage-log {path}: {error.strerror}", "usage_log") from None
        self._waiting: deque[bytes] = deque()
        self._news = threading.Condition()
        self._reopen = self._closed = self._failing = False
        self.dropped = 0
        self._thread = threading.Thread(target=self._run, name="usage-log", daemon=True)
        self._thread.start()

    def write(self, line: dict[str, Any]) -> None:
        data = _encode(line) + b"\n"
        with self._news:
            if len(self._waiting) >= _MOST_WAITING:
                self._waiting.popleft()
                self.dropped += 1
            self._waiting.append(data)
            self._news.notify()

    def reopen(self) -> None:
        with self._news:
            self._reopen = True
            self._news.notify()

    def close(self, timeout_s: float = 5.0) -> None:
        """Write what waits; what a full disk does not take within `timeout_s` is lost."""
        with self._news:
            self._closed = True
            self._news.notify()
        self._thread.join(timeout_s)
        if lost := len(self._waiting) + self.dropped:
            log.error("--usage-log: %d lines could not be written", lost)

    def _run(self) -> None:
        while True:
            with self._news:
                while not (self._waiting or self._reopen or self._closed):
                    self._news.wait()
                line = self._waiting[0] if self._waiting else None
                reopen, closed = self._reopen, self._closed
            if line is not None and self._append(line):
                with self._news:
                    if self._waiting and self._waiting[0] is line:
                        self._waiting.popleft()
            elif line is not None and not reopen:
                with self._news:
                    self._news.wait(_RETRY_S)
            elif reopen:  # also if the old file takes no more: the new one may be on another disk
                self._start_again()
            elif closed:
                os.close(self._file)
                return

    def _append(self, line: bytes) -> bool:
        try:
            size = os.fstat(self._file).st_size
            written = os.write(self._file, line)
            if written < len(line):
                os.ftruncate(self._file, size)
                raise OSError(None, f"only {written} bytes of a line fit")
        except OSError as error:
            if not self._failing:
                log.error("--usage-log %s: %s; lines wait for room", self._path, error.strerror)
            self._failing = True
            return False
        self._failing = False
        return True

    def _start_again(self) -> None:
        with self._news:
            self._reopen = False
        try:
            new = _open(self._path)
        except OSError as error:
            log.error("--usage-log %s: %s; the file that is open stays", self._path, error.strerror)
            return
        os.close(self._file)
        self._file = new


def _open(path: str) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)
